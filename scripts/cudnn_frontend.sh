#!/usr/bin/env bash
# scripts/cudnn_frontend.sh [FOLDER]   puts the headers of NVIDIA's cudnn-frontend into FOLDER (default: build/cudnn_frontend), for make cuda CUDNN=1.
#
# They come out of its Python wheel (12 MB; nothing is installed). cuDNN itself comes with CUDA's packages. Nothing is done where they are there.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/cudnn_frontend}
wheel='nvidia-cudnn-frontend==1.32.0'

if [ -e "$folder/include/cudnn_frontend.h" ]; then exit 0; fi
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
if ! python3 -m pip download -q --no-deps --only-binary :all: -d "$download" "$wheel"; then
    printf 'cudnn_frontend.sh: pip could not get %s\nHINT: its header files can come from anywhere: make cuda CUDNN=1 CUDNN_FRONTEND=folder\n' "$wheel" >&2
    exit 1
fi
rm -rf "$folder.part"
python3 - "$folder.part" "$download"/*.whl << 'END'
import pathlib, sys, zipfile
with zipfile.ZipFile(sys.argv[2]) as archive:
    for name in archive.namelist():
        if name.startswith("include/") and not name.endswith("/"):
            path = pathlib.Path(sys.argv[1], name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))
END
mkdir -p "$(dirname "$folder")" && rm -rf "$folder" && mv "$folder.part" "$folder"
