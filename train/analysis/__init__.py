"""What goes on inside a model, and what a step takes on machines that are not here."""
