"""Asks a service of this machine whether it is healthy: `python -m service_kit.healthcheck ADDRESS [GRPC_SERVICE]`.

For health checks of containers, which have neither curl nor a gRPC client. ADDRESS is an http:// URL that answers 200
when healthy, or any gRPC address (e.g. unix:/run/dspark/verifier.sock) with standard health. The exit status is 0 or 1,
with one line of words.
"""

from __future__ import annotations

import sys
import urllib.request

_TIMEOUT_S = 3.0


def check_http(url: str) -> str:
    """What is wrong with the service at `url`; "" if nothing."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy
    try:
        opener.open(url, timeout=_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def check_grpc(address: str, service: str) -> str:
    """What is wrong with gRPC service `service` at `address`; "" if it is SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S).status
        except grpc.RpcError as error:
            return str(error.code().name)
    serving = health_pb2.HealthCheckResponse.SERVING
    return "" if status == serving else str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


def main(arguments: list[str]) -> int:
    """Prints the result; returns the exit status."""
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m service_kit.healthcheck ADDRESS [GRPC_SERVICE]", file=sys.stderr)
        return 2
    address, service = (*arguments, "")[:2]
    problem = check_http(address) if address.startswith("http://") else check_grpc(address, service)
    print(f"{address} {service}: {problem or 'healthy'}")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
