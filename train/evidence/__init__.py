"""What is claimed of TAPE, the experiments that test it, and the page that says what came out."""
