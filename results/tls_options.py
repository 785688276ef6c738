"""Checks of a URL's TLS options. redis-py reads the files only when it connects, and its errors do not name them."""

from __future__ import annotations

import ssl
from typing import Any

from millrace.results.errors import InvalidRedisURL

_CERT_REQS = ("none", "optional", "required")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def check_tls_options(options: dict[str, Any]) -> None:
    """Raises InvalidRedisURL with the name of the option, and of the file that cannot be used."""
    if (cert_reqs := options.get("ssl_cert_reqs", "required")) not in _CERT_REQS:
        raise InvalidRedisURL(f"the URL's ssl_cert_reqs must be none, optional or required, not {cert_reqs!r}")
    authorities, certificate, key = (_readable(name, options.get(name)) for name in _FILES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authorities:
        try:
            context.load_verify_locations(authorities)
        except ssl.SSLError as error:
            raise InvalidRedisURL(f"the URL's ssl_ca_certs={authorities} contains no valid PEM certificate") from error
    if key and not certificate:
        raise InvalidRedisURL(f"the URL's ssl_keyfile={key} needs its certificate: add ssl_certfile=/path/cert.pem")
    if certificate:
        try:  # without a password OpenSSL would ask for one on the terminal
            context.load_cert_chain(certificate, key, options.get("ssl_password", ""))
        except ssl.SSLError as error:
            files = f"ssl_certfile={certificate}" + (f" and ssl_keyfile={key}" if key else " (no ssl_keyfile is given)")
            needed = "a PEM certificate and its key are needed, and ssl_password if the key is encrypted"
            raise InvalidRedisURL(f"the URL's {files} cannot be used: {needed}") from error


def _readable(option: str, path: str | None) -> str | None:
    if path is not None:
        try:
            open(path, "rb").close()
        except (OSError, ValueError) as error:
            why = (error.strerror or "").lower() if isinstance(error, OSError) else str(error)
            raise InvalidRedisURL(f"the URL's {option}={path} cannot be read: {why}") from error
    return path
