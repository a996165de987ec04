"""Makes the profile from what the stages of a tuning found."""
