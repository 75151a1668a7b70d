"""What is to be done to an installation: decided from a series and an inspection, before anything is changed."""
