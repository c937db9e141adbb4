"""Files of exported weights, by links that need no key and expire."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import FileResponse, Response

from turnstream.errors import BatchingError
from turnstream_server.gateway.bodies import json_response
from turnstream_server.gateway.descriptions import timestamp
from turnstream_server.gateway.state import Gateway
from turnstream_server.gateway.tinker_caller import Authenticated
from turnstream_server.operations.checkpoints import (
    CheckpointPath,
    folder_of,
    new_download,
    read_checkpoint,
    read_download,
)

router = APIRouter()
public = APIRouter()

_LINK_S: Final = 3_600


@router.get("/training_runs/{model_id}/checkpoints/external_weights/{name}/external_weights_urls")
async def external_weights_urls(
    model_id: str, name: str, request: Request, caller: Authenticated
) -> Response:
    """Return a link for each file of exported weights, for an hour."""
    path = CheckpointPath.parse(f"tinker://{model_id}/external_weights/{name}")
    await caller.checkpoint(path)
    files = await asyncio.to_thread(_files, _folder(caller.gateway, path))
    expires_ms = round((time.time() + _LINK_S) * 1000)
    token = await new_download(caller.client, caller.owner, path, seconds=_LINK_S)
    urls = {each: str(request.url_for("download", token=token, name=quote(each))) for each in files}
    return json_response({"urls": urls, "expires": timestamp(expires_ms)})


@public.get("/downloads/{token}/{name:path}")
async def download(token: str, name: str, request: Request) -> Response:
    """Return a file of exported weights, in parts."""
    gateway: Gateway = request.app.state.gateway
    owner, path = await read_download(gateway.client, token)
    await gateway.threads.run(lambda client: read_checkpoint(client, owner, path))
    files = await asyncio.to_thread(_files, _folder(gateway, path))
    if name not in files:
        raise HTTPException(404, f"{path} has no file {name!r}, only {', '.join(files)}")
    return FileResponse(files[name], media_type="application/octet-stream")


def _folder(gateway: Gateway, path: CheckpointPath) -> Path:
    if gateway.options.folder is None:
        message = "this gateway offers no downloads: start it with --folder, that of its workers"
        raise BatchingError(message)
    return gateway.options.folder / folder_of(path)


def _files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by their names below it; 404 if it does not exist."""
    found = sorted(each for each in folder.rglob("*") if each.is_file())
    if not found:
        raise HTTPException(404, f"the folder {folder.name!r} is not on the disk of this gateway")
    return {each.relative_to(folder).as_posix(): each for each in found}
