"""The real scripts, run by a real Lua 5.1 in this process, on the commands of a store.

Each script is compiled once. As in a server, it finds KEYS, ARGV, `redis` and `cjson`, and may not
touch a missing global. Its flags state whether it writes, and whether it runs in a full server. Any
other part of `redis` raises.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lupa.lua51 as lupa

from simulator.store.commands import WRITES
from simulator.store.values import Status, StoreError

Carry = Callable[[bytes, Sequence[bytes]], Any]

_FLAGS = re.compile(rb"#!lua(?: +flags=([a-z,-]+))?[^\n]*")

_SETUP = rb"""
local carry, sha1hex, decoded = ...
redis = {}
function redis.error_reply(text)
  return {err = text}
end
local function taken(reply, kind, ...)
  if not kind then
    return reply
  elseif kind == 'list' then
    return {...}
  end
  return {[kind] = (...)}
end
function redis.call(...)
  local reply = taken(carry(...))
  if type(reply) == 'table' and reply.err then
    error(reply, 0)
  end
  return reply
end
function redis.pcall(...)
  return taken(carry(...))
end
redis.sha1hex = sha1hex
cjson = {null = setmetatable({}, {__tostring = 'null'})}
cjson.decode = decoded
local function refusing(library)
  return {__index = function(_, name) error(library .. name .. ' is not simulated') end}
end
setmetatable(redis, refusing('redis.'))
setmetatable(cjson, refusing('cjson.'))
local loadstring, pcall, type, select = loadstring, pcall, type, select
local function compile(source, name)
  local script, problem = loadstring(source, name)
  if not script then
    error(problem, 0)
  end
  return script
end
local function pack(...)
  return {...}
end
local unpack, tostring = unpack, tostring
local function run(script, num_keys, ...)
  local is_well, reply = pcall(script, {unpack({...}, 1, num_keys)}, {select(num_keys + 1, ...)})
  if type(reply) ~= 'table' then
    if is_well then
      return reply
    end
    return 'defect', 'ERR ' .. tostring(reply)
  elseif reply.err then
    return 'err', reply.err
  elseif reply.ok then
    return 'ok', reply.ok
  end
  local last = 0
  while reply[last + 1] ~= nil do
    last = last + 1
  end
  return 'list', last, unpack(reply, 1, last)
end
local function end_setup()
  for _, name in ipairs({'os', 'io', 'package', 'python', 'dofile', 'loadfile', 'require'}) do
    _G[name] = nil
  end
  setmetatable(_G, {
    __index = function(_, name) error('no global ' .. tostring(name), 2) end,
    __newindex = function(_, name) error('a script sets the global ' .. tostring(name), 2) end,
  })
end
return compile, run, pack, cjson.null, end_setup
"""


class ScriptDefectError(Exception):
    """A script failed otherwise than by a reply: it is a defect."""


class LoadedScript(NamedTuple):
    """A compiled script."""

    function: Any
    allows_oom: bool
    is_read_only: bool


class Scripts:
    """One Lua state, and the scripts that were loaded into it; dear to make, so shared by stores.

    Attributes:
        carry_out: gives the reply of a command: its name in capitals, its words.
    """

    def __init__(self) -> None:
        self.by_sha: dict[bytes, LoadedScript] = {}
        self.carry_out: Carry = _nothing
        self._is_read_only = False
        runtime: Any = lupa.LuaRuntime  # its stub knows none of these arguments
        self._lua = runtime(
            encoding=None, unpack_returned_tuples=True, register_eval=False, register_builtins=False
        )
        load = self._lua.eval(b"loadstring")
        setup = load(_SETUP, b"=setup")
        parts = setup(self._carry, _sha1hex, lambda text: self._table(json.loads(text)))
        self._compile, self._run, self._pack, self._null, end = parts
        end()

    def load(self, source: bytes) -> bytes:
        """Compile a script; its SHA-1, in hex."""
        sha = _sha1hex(source)
        if sha not in self.by_sha:
            first = _FLAGS.match(source)
            if first is None:
                raise StoreError("ERR the script has no line #!lua")
            flags = frozenset((first[1] or b"").split(b",")) - {b""}
            if flags - {b"no-writes", b"allow-oom"}:
                raise StoreError(f"ERR unknown flags {sorted(flags)}")
            body = b"local KEYS, ARGV = ..." + source[first.end() :]
            function = self._compile(body, b"=script")
            self.by_sha[sha] = LoadedScript(function, b"allow-oom" in flags, b"no-writes" in flags)
        return sha

    def run(self, script: LoadedScript, num_keys: int, words: Sequence[bytes]) -> Any:
        """Return the reply; raises StoreError for an error reply, otherwise ScriptDefectError."""
        self._is_read_only = script.is_read_only
        reply = self._run(script.function, num_keys, *words)
        if type(reply) is not tuple:
            return self._from_lua(reply)
        kind = reply[0]
        if kind == b"list":
            return [r if type(r) is bytes else self._from_lua(r) for r in reply[2:]]
        if kind == b"ok":
            return Status(reply[1])
        text = reply[1].decode(errors="replace")
        raise StoreError(text) if kind == b"err" else ScriptDefectError(text)

    def _carry(self, *words: Any) -> Any:
        """redis.call: a value; or nil, what kind of table it is, and its values."""
        words_of_bytes = [word if type(word) is bytes else _number(word) for word in words]
        name = words_of_bytes[0].upper()
        try:
            if self._is_read_only and name in WRITES:
                return None, b"err", b"ERR Write commands are not allowed from read-only scripts."
            reply = self.carry_out(name, words_of_bytes)
        except StoreError as error:
            return None, b"err", str(error).encode()
        if reply is None:
            return False
        if type(reply) is list:
            return None, b"list", *[r if type(r) is bytes else self._to_lua(r) for r in reply]
        if type(reply) is Status:
            return None, b"ok", bytes(reply)
        return reply

    def _to_lua(self, reply: Any) -> Any:
        if reply is None:
            return False
        if type(reply) is list:
            return self._pack(*[r if type(r) is bytes else self._to_lua(r) for r in reply])
        return reply

    def _from_lua(self, reply: Any) -> Any:
        if type(reply) is bytes or type(reply) is int:
            return reply
        if reply is None or reply is False:
            return None
        if reply is True:
            return 1
        if type(reply) is float:
            return int(reply)
        return self._list(reply)

    def _list(self, table: Any) -> list[Any]:
        """A list within a list; one of errors or statuses no script gives."""
        values: list[Any] = []
        for position in range(1, len(table) + 1):
            value = table[position]
            if value is None:
                break
            values.append(self._from_lua(value))
        return values

    def _table(self, value: Any) -> Any:
        """Return a JSON value as a Lua value."""
        if isinstance(value, dict):
            pairs = {key.encode(): self._table(item) for key, item in value.items()}
            return self._lua.table_from(pairs)
        if isinstance(value, list):
            return self._lua.table_from([self._table(item) for item in value])
        if isinstance(value, str):
            return value.encode()
        return self._null if value is None else value


def _number(value: Any) -> bytes:
    if type(value) is int:
        return b"%d" % value
    if type(value) is float:
        return b"%.17g" % value
    raise ScriptDefectError(f"redis.call takes strings and numbers, not {value!r}")


def _nothing(name: bytes, words: Sequence[bytes]) -> Any:
    raise ScriptDefectError(f"no store carries out {name.decode()}")


@functools.lru_cache
def _sha1hex(text: bytes) -> bytes:
    """Return a digest; every publisher loads all of its scripts whenever it connects."""
    return hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
