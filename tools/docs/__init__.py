"""What is made for the documentation: the site, its reference, the page of settings, the pictures."""
