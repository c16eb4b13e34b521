"""The console: a web page beside a broker's API, on which people see the queue and steer it (R50)."""
