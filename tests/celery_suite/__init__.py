"""What Celery's and kombu's own tests say of Postroom as their broker."""
