"""What becomes of a finished model: exported to other programs, served to people, adapted to a new site."""
