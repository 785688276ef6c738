"""The RQ gateway: a worker for RQ, a client of Millrace."""
