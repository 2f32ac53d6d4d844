#!/bin/bash
# Puts our hooks into an installed LMDeploy 0.11.0, takes them out again, or says which is the case.
#
#     third_party/lmdeploy/apply_patches.sh apply | reverse | status [FOLDER]
#
# FOLDER is the package itself (site-packages/lmdeploy); without it, the one that $PYTHON (default: python) imports.
# A folder of another version, or with a file that is neither as released nor as patched, is left as it is.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
action=${1:-status}
fail() { echo "apply_patches.sh: $*" >&2; exit 1; }
case $action in apply | reverse | status) ;; *) fail "unknown action $action: use apply, reverse or status" ;; esac

if [ $# -ge 2 ]; then
    folder=$2
else
    folder=$("${PYTHON:-python}" -c 'import importlib.util as u; print(u.find_spec("lmdeploy").submodule_search_locations[0])') \
        || fail "no lmdeploy in ${PYTHON:-python}: set PYTHON or give its folder"
fi
[ -f "$folder/version.py" ] || fail "$folder is no lmdeploy package"
wanted=$(cat "$here/VERSION")
found=$(sed -n "s/^__version__ = '\(.*\)'$/\1/p" "$folder/version.py")
[ "$found" = "$wanted" ] || fail "the patches are for LMDeploy $wanted, $folder is ${found:-unknown}"

hash_of() { if [ -f "$1" ]; then sha256sum "$1" | cut -d' ' -f1; else echo none; fi; }

# Sets `state` of the files below a folder: released, patched, or the name of a file that is neither.
read_state() {
    local num_released=0 num_patched=0 num_files=0 released patched file now
    while read -r released patched file; do
        num_files=$((num_files + 1))
        now=$(hash_of "$1/$file")
        if [ "$now" = "$released" ]; then num_released=$((num_released + 1))
        elif [ "$now" = "$patched" ]; then num_patched=$((num_patched + 1))
        else state=$file; return; fi
    done < "$here/files.sha256"
    if [ $num_released = $num_files ]; then state=released
    elif [ $num_patched = $num_files ]; then state=patched
    else state="a part of the files"; fi
}

read_state "$folder"
case $state in released | patched) ;; *) fail "$folder: $state differs from LMDeploy $wanted, released or patched; nothing is changed" ;; esac
if [ "$action" = status ]; then echo "$state"; exit 0; fi
if [ "$action" = apply ]; then goal=patched; else goal=released; fi
if [ "$state" = "$goal" ]; then echo "$goal already"; exit 0; fi

# Patch a copy, compare it, and only then replace the files.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
while read -r _ _ file; do
    mkdir -p "$work/$(dirname "$file")"
    if [ -f "$folder/$file" ]; then cp "$folder/$file" "$work/$file"; fi
done < "$here/files.sha256"
if [ "$action" = apply ]; then
    for patch in "$here"/patches/*.patch; do patch --quiet -p1 -d "$work" < "$patch" || fail "$patch does not apply"; done
else
    for patch in $(ls -r "$here"/patches/*.patch); do patch --quiet -E -R -p1 -d "$work" < "$patch" || fail "$patch does not reverse"; done
fi
read_state "$work"
[ "$state" = "$goal" ] || fail "the patched files are not as expected ($state); nothing is changed"
while read -r _ _ file; do
    if [ -f "$work/$file" ]; then cp "$work/$file" "$folder/$file.new" && mv "$folder/$file.new" "$folder/$file"; else rm "$folder/$file"; fi
done < "$here/files.sha256"
echo "$goal"
