"""What differs from database to database."""
