"""Copies of what lies in object stores."""
