"""What Millrace costs and what it reaches, measured. `make bench` runs all of it and writes one JSON file."""
