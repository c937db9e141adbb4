"""The health command of the images: exit status 0 if the service of this container is ready.

It asks /readyz at the port of TURNSTREAM_METRICS_LISTEN, and prints the answer with its reason.
"""

import os
import socket
import sys

# A socket and no HTTP client: the import of one costs three times as much as the rest.
port = int(os.environ["TURNSTREAM_METRICS_LISTEN"].rpartition(":")[2])
try:
    connection = socket.create_connection(("127.0.0.1", port), timeout=4)
    if os.environ.get("TURNSTREAM_TLS_CERT"):
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # The certificate is that of another host name, and the peer is this container.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = context.wrap_socket(connection)
    with connection:
        connection.sendall(b"GET /readyz HTTP/1.0\r\nHost: localhost\r\n\r\n")
        answer = connection.makefile("rb").read().decode(errors="replace")
except OSError as error:
    sys.exit(f"port {port}: {error}")
print(answer.partition("\r\n\r\n")[2])
sys.exit(answer.split(" ", 2)[1:2] != ["200"])
