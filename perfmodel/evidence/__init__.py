"""Published figures as data, and how well the model reproduces them."""
