"""What drafters are trained for, one file per kind."""
