"""Handlers a second that do nothing: Postroom's App beside other task queues, and Celery on both."""
