"""What runs the stages: a tuning from the first step to the profile, a plan, a verification."""
