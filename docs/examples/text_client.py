"""Streams an answer over gRPC: python docs/examples/text_client.py "Why is the sky blue?"

Needs a running server (`make serve` or `dspark serve`); its text gRPC service listens on the port after the REST port.
"""

from __future__ import annotations

import argparse
import sys

import grpc
from dspark.v1 import gateway_pb2, gateway_pb2_grpc


def main() -> int:
    """Sends one chat turn and prints the text as it comes."""
    parser = argparse.ArgumentParser(description="Streams an answer over gRPC.")
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:8001")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()

    request = gateway_pb2.GenerateTextRequest(
        messages=[gateway_pb2.ChatMessage(role="user", content=options.prompt)], max_tokens=options.max_tokens
    )
    metadata = [("authorization", f"Bearer {options.api_key}")] if options.api_key else []
    with grpc.insecure_channel(options.address) as channel:
        stub = gateway_pb2_grpc.TextServiceStub(channel)
        try:
            for response in stub.GenerateText(request, metadata=metadata):
                if response.WhichOneof("event") == "chunk":
                    print("".join(piece.text for piece in response.chunk.pieces), end="", flush=True)
                else:
                    summary = response.summary
                    accepted = summary.speculation.num_accepted
                    print(f"\n[{summary.num_completion_tokens} tokens, {accepted} of them accepted drafts]")
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
