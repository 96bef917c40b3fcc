"""The rooms of Brisk: each module has one noun for a name and one job."""
