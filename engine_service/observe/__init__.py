"""What operators see: health, metrics, and the HTTP endpoint that serves both."""
