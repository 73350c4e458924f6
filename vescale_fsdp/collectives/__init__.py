"""Collectives: process groups, the exchanges that backends lack, and what the rest of the package calls."""
