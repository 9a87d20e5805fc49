"""Loss tables from real weights: built, shown and compared."""
