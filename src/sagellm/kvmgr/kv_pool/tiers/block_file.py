"""A portable file of KV blocks, written and read as a stream.

    8 bytes       sageKVf1
    u32           length of the head, which is JSON: format version, digest (hex) and details (text by name)
                  of the format, bytes and tokens of a block, codec, and the most blocks that follow
    then for each block, behind the block before it in its prompt:
      u32         length of its row, which is JSON: parent (hex), namespace, tokens (hex), used_s
      512 bytes   its header, as on disk (`BlockHeader`): hash, codec, size, checksum
      bytes       what is stored, behind its codec
    u32           0
    u64           how many blocks there were: a file without it is truncated

Numbers are little-endian. The file holds the tokens of prompts and answers. Checksums show damage; they are
no protection against a file that was made to deceive.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from io import BufferedIOBase
from typing import Any, BinaryIO, NamedTuple

from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import (
    FORMAT_VERSION,
    HEADER_BYTES,
    BlockFormat,
    BlockHeader,
    Buffer,
    StoredBlock,
)
from sagellm.core.types import TOKEN_BYTES
from sagellm.kvmgr.kv_pool.tiers.disk_catalogue import parse_namespace
from sagellm.kvmgr.kv_pool.tiers.disk_reader import MAX_BLOCK_BYTES
from sagellm.kvmgr.kv_pool.tiers.disk_slab import aligned_buffer

FILE_MAGIC = b"sageKVf1"
_LENGTH, _COUNT = struct.Struct("<I"), struct.Struct("<Q")
_MAX_JSON_BYTES = 1 << 20
NO_SLOT = -1


class FileBlock(NamedTuple):
    """A block of a file. `block.slot` is `NO_SLOT`. `payload` is valid until the next block is read."""

    block: StoredBlock
    header: BlockHeader
    header_bytes: bytes
    payload: memoryview


class BlockFileWriter:
    """Writes the head at once, and its end in `finish`."""

    def __init__(
        self, file: BinaryIO, block_format: BlockFormat, codec: str, token_bytes: int, num_blocks: int
    ) -> None:
        self._file = file
        self.num_blocks = 0
        head = {
            "format_version": FORMAT_VERSION, "digest": block_format.digest.hex(), "codec": codec,
            "bytes_per_block": block_format.bytes_per_block, "tokens_per_block": token_bytes // TOKEN_BYTES,
            "num_blocks": num_blocks, "details": dict(block_format.details),
        }  # fmt: skip
        file.write(FILE_MAGIC)
        self._write_json(head)

    def write(self, block: StoredBlock, header: bytes, payload: Buffer) -> None:
        row = {
            "parent": block.parent.hex(), "namespace": json.dumps(block.namespace),
            "tokens": block.tokens.hex(), "used_s": block.used_s,
        }  # fmt: skip
        self._write_json(row)
        self._file.write(header)
        self._file.write(payload)
        self.num_blocks += 1

    def finish(self) -> None:
        self._file.write(_LENGTH.pack(0) + _COUNT.pack(self.num_blocks))
        self._file.flush()

    def _write_json(self, values: object) -> None:
        data = json.dumps(values).encode()
        self._file.write(_LENGTH.pack(len(data)) + data)


class BlockFileReader:
    """Reads the head at once. Everything raises `KVDataError` for what is no such file, damaged or truncated.

    `num_blocks`: the most that follow. `token_bytes`: of the tokens of a block.
    """

    def __init__(self, file: BufferedIOBase, name: str) -> None:
        self._file, self.name = file, name
        self.num_read = 0
        if self._read(len(FILE_MAGIC)) != FILE_MAGIC:
            raise KVDataError(f"{name} is no file of KV blocks: name one that `sagellm cache export` wrote")
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        try:
            head = self._json(length)
            version = int(head["format_version"])
            digest, num_bytes = bytes.fromhex(head["digest"]), int(head["bytes_per_block"])
            details = {str(key): str(value) for key, value in dict(head["details"]).items()}
            self.codec = str(head["codec"])
            self.token_bytes = int(head["tokens_per_block"]) * TOKEN_BYTES
            self.num_blocks = int(head["num_blocks"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise self._damaged() from error
        if version != FORMAT_VERSION:
            raise KVDataError(
                f"{name} has blocks of format version {version}, and this sagellm reads {FORMAT_VERSION}: "
                f"import it with the sagellm that wrote it"
            )
        if not 0 < num_bytes <= MAX_BLOCK_BYTES or self.num_blocks < 0:
            raise self._damaged()
        self.format = BlockFormat(digest, num_bytes, details)
        self._payload = aligned_buffer(num_bytes)

    def blocks(self) -> Iterator[FileBlock]:
        """The blocks in order. Their headers are sound; nothing else is compared."""
        while True:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            if not length:
                break
            yield self._block(length)
            self.num_read += 1
        (count,) = _COUNT.unpack(self._exactly(_COUNT.size))
        if count != self.num_read:
            raise self._damaged()

    def _block(self, length: int) -> FileBlock:
        try:
            row = self._json(length)
            parent, tokens = bytes.fromhex(row["parent"]), bytes.fromhex(row["tokens"])
            namespace, used_s = parse_namespace(row["namespace"]), float(row["used_s"])
            header_bytes = self._exactly(HEADER_BYTES)
            header = BlockHeader.unpack(header_bytes)
        except _TruncatedError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, KVDataError) as error:
            raise self._damaged() from error
        if header.num_bytes > self.format.bytes_per_block or not math.isfinite(used_s):
            raise self._damaged()
        payload = self._payload[: header.num_bytes]
        self._fill(payload)
        block = StoredBlock(NO_SLOT, header.token_hash, parent, namespace, tokens, used_s)
        return FileBlock(block, header, header_bytes, payload)

    def _json(self, length: int) -> dict[str, Any]:
        if length > _MAX_JSON_BYTES:
            raise ValueError("too long")
        return dict(json.loads(self._exactly(length)))

    def _exactly(self, num_bytes: int) -> bytes:
        data = self._read(num_bytes)
        if len(data) < num_bytes:
            raise self._truncated()
        return data

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        return bytes(data[: self._read_into(memoryview(data))])

    def _fill(self, target: memoryview) -> None:
        if self._read_into(target) < len(target):
            raise self._truncated()

    def _read_into(self, target: memoryview) -> int:
        """Bytes read: fewer at the end of the file. A pipe gives less at a time."""
        done = 0
        while done < len(target):
            got = self._file.readinto(target[done:])
            if not got:
                break
            done += got
        return done

    def _truncated(self) -> _TruncatedError:
        return _TruncatedError(f"{self.name} ends after {self.num_read} whole blocks: export it again")

    def _damaged(self) -> KVDataError:
        return KVDataError(f"{self.name} is damaged behind {self.num_read} whole blocks: export it again")


class _TruncatedError(KVDataError):
    """The file ends within a block."""
