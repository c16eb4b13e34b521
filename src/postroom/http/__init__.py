"""HTTP beside a served broker.

Health, metrics, the admin API, sending and polling for those without an SDK.
"""
