"""The RQ gateway: a worker for RQ, a producer for Millrace."""
