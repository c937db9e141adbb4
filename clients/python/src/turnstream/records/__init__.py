"""Values to bytes and back: everything that is stored or sent, as format 0.

`turns`, `events`, `manifests` are framed protobuf with raw arrays; `configs` are JSON; `batches`
are Arrow, and alone need pyarrow; `statuses` maps errors to gRPC and back. Every `decode_*` raises
CorruptRecordError for damaged or contradictory bytes, UnknownFormatError for another release's.
"""
