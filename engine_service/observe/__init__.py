"""Health and metrics for operators, and the HTTP endpoint that serves both."""
