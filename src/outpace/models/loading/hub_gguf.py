"""GGUF files on the hub, named REPO:QUANT as in llama.cpp: `Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M`."""

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from outpace.lib.errors import ModelError, first_line
from outpace.models.loading.download import download

HUB_TIMEOUT_S = 5.0
DEFAULT_QUANT = "Q4_K_M"
_NAME = re.compile(r"([\w.-]+/[\w.-]+?)(?::([\w.-]+))?")
_QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|MXFP\d|NVFP\d|B?F16|FP16|FP?32)\w*)(?:-imat)?$", re.I)
_PART_OF = re.compile(r"-\d{5}-of-(\d{5})$")
_NO_MODELS = ("mmproj", "imatrix")  # parts of names of other GGUF files: image encoders and statistics
_SHA256 = re.compile(r"[0-9a-f]{64}")


def gated(repo: str) -> ModelError:
    """The error for a gated model, for which the hub answers 401 or 403 without details."""
    from huggingface_hub import constants

    return ModelError(
        f"{repo}: its authors restrict access: accept their conditions at {constants.ENDPOINT}/{repo}, then run "
        "`hf auth login` or set HF_TOKEN"
    )


def is_gguf_name(name: str) -> bool:
    """Whether a name is REPO:QUANT, or a repository whose name contains GGUF."""
    match = _NAME.fullmatch(name)
    return match is not None and (match[2] is not None or "gguf" in match[1].partition("/")[2].lower())


def fetch_gguf(name: str) -> Path:
    """The file of REPO:QUANT; without :QUANT that of Q4_K_M, or else the repository's first. The hub is asked unless
    its cache has that quantisation, and downloads stay in the cache. If the hub cannot be reached, a name without
    :QUANT takes the first file in the cache.

    Raises:
        ModelError: no such repository or quantisation, a model in several files, a failed download.
    """
    from huggingface_hub import HfApi, constants

    match = _NAME.fullmatch(name)
    assert match is not None, "`is_gguf_name` holds"
    repo, quant = match[1], match[2]
    cached = _cached(repo)
    for file in _matching(cached, quant or DEFAULT_QUANT):
        return cached[file]
    try:
        listed = sorted(one for one in HfApi().list_repo_files(repo) if _is_model(one))
    except Exception as error:
        if cached and quant is None:
            return next(iter(cached.values()))
        held = f"the hub's cache has {_shown(cached)} of it only" if cached else "not in the hub's cache"
        raise ModelError(f"{name}: {held}, and {constants.ENDPOINT} was asked: {first_line(error)}") from error
    return _download(repo, _chosen(name, listed, quant))


def _chosen(name: str, listed: list[str], quant: str | None) -> str:
    """The file of a quantisation among all GGUF files of a repository."""
    whole = [file for file in listed if _parts_of(file) is None]
    found = _matching(whole, quant or DEFAULT_QUANT) or ([] if quant else whole)
    if found:
        return found[0]
    available = f"available are {_shown(whole)}" if whole else "no quantisation is available in one file"
    split = _matching(listed, quant) if quant else listed
    if split:
        count = int(_parts_of(split[0]) or 0)
        raise ModelError(f"{name}: this quantisation is split into {count} files, which cannot be read; {available}")
    if not listed:
        raise ModelError(f"{name}: this repository has no GGUF file; give its name without a quantisation")
    raise ModelError(f"{name}: no quantisation {quant!r} in this repository; {available}")


def _download(repo: str, file: str) -> Path:
    """Download a file into the hub's cache, in its layout. The hub's own client neither resumes a stopped download nor
    checks the content, so the content is put where the client looks first, and the client adds the name."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import GatedRepoError
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(repo, file)
    try:
        about = get_hf_file_metadata(url, timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise gated(repo) from error
    except Exception as error:
        raise ModelError(f"{repo}: {file} cannot be downloaded: {first_line(error)}") from error
    if about.etag is None or about.size is None or about.commit_hash is None:
        raise ModelError(f"{url}: states no commit, checksum or size, as the hub does; check HF_ENDPOINT")
    # Files outside large-file storage have git's hash, not a SHA-256.
    sha256 = about.etag if _SHA256.fullmatch(about.etag) else None
    content = _storage(repo) / "blobs" / about.etag
    download(url, content, Path(file).name, about.size, sha256, build_hf_headers())
    try:
        return Path(hf_hub_download(repo, file, etag_timeout=HUB_TIMEOUT_S))
    except Exception as error:
        raise ModelError(f"{repo}: {file} cannot be added to the hub's cache: {first_line(error)}") from error


def _storage(repo: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _cached(repo: str) -> dict[str, Path]:
    """Names and paths of a repository's GGUF files in the hub's cache."""
    storage = _storage(repo)
    newest = storage / "refs" / "main"
    if not newest.is_file():
        return {}
    folder = storage / "snapshots" / newest.read_text().strip()
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in found.items() if _is_model(name) and _parts_of(name) is None}


def _is_model(file: str) -> bool:
    return file.lower().endswith(".gguf") and not any(one in file.lower() for one in _NO_MODELS)


def _parts_of(file: str) -> str | None:
    """Number of parts of the model of this file, as text; None if the file is the whole model."""
    match = _PART_OF.search(PurePosixPath(file).stem)
    return None if match is None or int(match[1]) == 1 else match[1]


def _quant_of(file: str) -> str:
    """A file's quantisation: the end of its name or of its folder's, or else its whole name."""
    path = PurePosixPath(file)
    stem = _PART_OF.sub("", path.stem)
    match = _QUANT.search(stem) or _QUANT.search(path.parent.name)
    return (match[1] if match else stem).upper()


def _matching(files: Iterable[str], quant: str) -> list[str]:
    """The files of a quantisation, best first; `Q4_K_XL` also finds `UD-Q4_K_XL`."""
    wanted = quant.upper()
    found = [file for file in files if _quant_of(file) in (wanted, f"UD-{wanted}")]
    return sorted(found, key=lambda file: (_quant_of(file) != wanted, file))


def _shown(files: Iterable[str]) -> str:
    return ", ".join(sorted({_quant_of(file) for file in files}))
