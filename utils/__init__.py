"""One folder for each part of Brisk; each module has one noun for a name and one job."""

__version__ = "0.1.0"
