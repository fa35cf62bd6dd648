"""Placements from specs and budgets; pure, standard library only."""
