from turnstream.records.batches import EncodedMiniBatch
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.serving.get import CHUNK_BYTES, data_messages, header_message


def test_a_data_message_is_the_very_bytes_that_protobuf_would_write():
    data = bytes(range(256)) * 3

    messages = list(data_messages(memoryview(data)))

    assert messages == [wire.GetChunk(data=data).SerializeToString()]


def test_data_is_cut_into_chunks_that_join_to_the_whole():
    data = b"abcdefgh" * (CHUNK_BYTES // 4) + b"rest"

    chunks = [wire.GetChunk.FromString(m).data for m in data_messages(memoryview(data))]

    assert [len(chunk) for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 4]
    assert b"".join(chunks) == data


def test_the_header_names_the_mini_batch_and_what_will_come():
    share = EncodedMiniBatch(data=memoryview(b"12345"), content_hash="ab", num_bytes=5)

    message = header_message(share, step=7, mini_batch=1, num_mini_batches=2)

    assert wire.GetChunk.FromString(message).header == wire.MiniBatchHeader(
        step=7, mini_batch=1, num_mini_batches=2, num_bytes=5, content_hash="ab"
    )
