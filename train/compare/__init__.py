"""Several trained models side by side: sweeps, reports, tables, figures."""
