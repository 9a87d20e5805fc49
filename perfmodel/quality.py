"""Expected quantisation loss of a plan: the loss table times how often the decode steps use each expert."""
