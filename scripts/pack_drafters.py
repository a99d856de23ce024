"""Pack the drafters of targets for a release, and list them in the package, so that `outpace models pull` fetches them.

python scripts/pack_drafters.py --url URL --out dist qwen2.5-coder-0.5b qwen2.5-coder-1.5b

URL is the folder that the archives will be in. Run it before the wheel is built: the wheel has the list, but not the
drafters.
"""

import argparse
import zipfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from outpace.models.loading.pull import Archive, Release
from outpace.models.loading.shipped import TARGET

ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="folders in drafters/")
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafters", type=Path, default=ROOT / "drafters")
    parser.add_argument("--record", type=Path, default=ROOT / "src" / "outpace" / "data" / "release.json")
    given = parser.parse_args(arguments)
    for target in given.targets:
        if not (given.drafters / target / TARGET).is_file():
            parser.error(f"{given.drafters / target}: no {TARGET} there")
    given.out.mkdir(parents=True, exist_ok=True)
    packed = {target: pack(given.drafters / target, given.out / f"{target}.zip") for target in given.targets}
    release = Release(url=given.url.rstrip("/"), drafters=packed)
    given.record.write_text(release.model_dump_json(indent=1) + "\n")


def pack(folder: Path, archive: Path) -> Archive:
    """Zip a folder. The same files give the same bytes: times are left out."""
    with zipfile.ZipFile(archive, "w") as opened:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            opened.writestr(zipfile.ZipInfo(file.relative_to(folder).as_posix()), file.read_bytes())
    content = archive.read_bytes()
    return Archive(file=archive.name, size=len(content), sha256=sha256(content).hexdigest())


if __name__ == "__main__":
    main()
