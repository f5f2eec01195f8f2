#!/bin/sh
# SPDX-License-Identifier: MIT
#
# Makes the private toolchain folder: newer Debian (or Ubuntu) packages of the shader compiler, the
# SPIR-V tools, Vulkan headers, Vulkan Memory Allocator, volk, the validation layer and lavapipe,
# resolved by apt in a root of its own from the mirror that this machine already uses, and unpacked
# there. The system is not changed, and no root rights are needed.
#
#   cmake/toolchain.sh [FOLDER] [--refresh]      FOLDER is build/toolchain by default
#
#   FOLDER/bin/{glslc,spirv-val,spirv-opt,...}   run through the folder's own dynamic loader
#   FOLDER/bin/python3                           Python with safetensors, for a test; optional
#   FOLDER/include                               headers
#   FOLDER/lvp_icd.json                          Vulkan driver manifest of the newer lavapipe
#   FOLDER/loader, FOLDER/lib                    links: dynamic loader, library folder
#   FOLDER/versions.txt                          what was unpacked
#
# The folder may be moved or copied; the programs of cmake/with_new_lavapipe.sh may not.
set -eu

packages="glslc spirv-tools glslang-tools libvulkan-dev libvulkan1 vulkan-validationlayers
 libvulkan-memory-allocator-dev libvulkan-volk-dev mesa-vulkan-drivers libc6 libstdc++6"
optional_packages="python3-safetensors python3-numpy" # a test reads checkpoints with them
needed_headers="1.4" # oldest Vulkan headers that Bellows compiles with

source_folder=$(cd "$(dirname "$0")/.." && pwd)
folder=$source_folder/build/toolchain
refresh=no
for argument in "$@"; do
    case $argument in
    --refresh) refresh=yes ;;
    -*) echo "toolchain: unknown option $argument" >&2; exit 2 ;;
    *) folder=$argument ;;
    esac
done

die() {
    echo "toolchain: $*" >&2
    exit 1
}

for program in apt-get apt-config apt-cache dpkg dpkg-deb tar sha256sum find sed patchelf; do
    command -v "$program" >/dev/null || die "needs the program '$program' (Debian or Ubuntu)"
done

stamp=$(sha256sum "$0" | cut -d' ' -f1)
if [ "$refresh" = no ] && [ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
. /etc/os-release
architecture=$(dpkg --print-architecture)

# --- where packages come from: this machine's own mirror, a newer suite ---------------------------
case " ${ID:-} ${ID_LIKE:-} " in
*" ubuntu "*)
    origin=Ubuntu
    suites="devel ${UBUNTU_CODENAME:-$VERSION_CODENAME}"
    components="main universe"
    keyrings="/usr/share/keyrings/ubuntu-archive-keyring.gpg"
    ;;
*" debian "*)
    origin=Debian
    suites="sid testing"
    components="main"
    keyrings="/usr/share/keyrings/debian-archive-keyring.gpg
 /usr/share/keyrings/debian-archive-keyring.pgp"
    ;;
*) die "this is '${PRETTY_NAME:-an unknown system}'; the folder is made on Debian or Ubuntu only" ;;
esac

# One line per configured source: URI|suite; security and backports archives hold too little.
mirrors=$(apt-get indextargets --format '$(REPO_URI)|$(RELEASE)|$(COMPONENT)' \
    'Created-By: Packages' 2>/dev/null |
    sed -n 's/|main$//p' | grep -v -e '-security' -e '-backports' -e '-updates' -e '-proposed' |
    grep -e "|${VERSION_CODENAME:-}\$" -e '|stable$' -e '|oldstable$' -e '|testing$' -e '|sid$' \
        -e '|unstable$' | cut -d'|' -f1 | sort -u) || true
[ -n "$mirrors" ] || die "apt knows no $origin archive with component 'main' (see apt-get indextargets)"

keyring=
for file in $keyrings; do
    [ -r "$file" ] && keyring=$file && break
done
[ -n "$keyring" ] || keyring=/etc/apt/trusted.gpg.d # older layouts: apt's trusted folder

# --- an apt root of its own -----------------------------------------------------------------------
apt=$folder/apt
rm -rf "$apt" "$folder/sysroot.new"
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/parts" "$apt/preferences.d"
: >"$apt/status"
{
    # Proxies, certificates and timeouts as on this machine; its hooks and preferences do not apply.
    apt-config dump --no-empty --format '%F "%v";%n' |
        grep -E '^Acquire::(http|https|ftp|mirror|Retries|ForceIPv[46]|Check-|Max-ValidTime)' || true
    cat <<END
Dir::Etc::Parts "$apt/parts";
Dir::Etc::SourceList "$apt/sources.list";
Dir::Etc::SourceParts "$apt/parts";
Dir::Etc::Preferences "$apt/none";
Dir::Etc::PreferencesParts "$apt/preferences.d";
Dir::State "$apt";
Dir::State::Lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::State::extended_states "$apt/extended_states";
Dir::Cache "$apt/cache";
Dir::Log "$apt";
APT::Architecture "$architecture";
APT::Architectures { "$architecture"; };
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::IndexTargets::deb::CNF::DefaultEnabled "false";
END
} >"$apt/apt.conf"

own_apt() {
    APT_CONFIG=$apt/apt.conf LC_ALL=C "$@"
}

log=$folder/toolchain.log
: >"$log"
found=
for mirror in $mirrors; do
    for suite in $suites; do
        echo "== $mirror $suite" >>"$log"
        if [ -d "$keyring" ]; then
            echo "deb $mirror $suite $components" >"$apt/sources.list"
        else
            echo "deb [signed-by=$keyring] $mirror $suite $components" >"$apt/sources.list"
        fi
        rm -rf "$apt/lists"
        mkdir -p "$apt/lists/partial"
        own_apt apt-get update -o APT::Update::Error-Mode=any >>"$log" 2>&1 ||
            own_apt apt-get update >>"$log" 2>&1 || continue
        headers=$(own_apt apt-cache show --no-all-versions libvulkan-dev 2>>"$log" |
            sed -n 's/^Version: \([0-9]*:\)\{0,1\}//p' | head -n 1)
        [ -n "$headers" ] || continue
        if dpkg --compare-versions "$headers" lt "$needed_headers"; then
            echo "libvulkan-dev $headers is older than $needed_headers" >>"$log"
            continue
        fi
        found="$mirror $suite"
        break 2
    done
done
if [ -z "$found" ]; then
    tail -n 20 "$log" >&2
    die "no suite of ($suites) at (" $mirrors ") has libvulkan-dev >= $needed_headers; log: $log"
fi

missing=
for package in $packages; do
    own_apt apt-cache show "$package" >/dev/null 2>&1 || missing="$missing $package"
done
[ -z "$missing" ] || die "missing at $found:$missing"
for package in $optional_packages; do
    if own_apt apt-cache show "$package" >/dev/null 2>&1; then
        packages="$packages $package"
    else
        echo "toolchain: $found has no $package; the test that needs it is left out"
    fi
done

echo "toolchain: fetching newer packages from $found"
if ! own_apt apt-get -y --download-only --no-install-recommends install $packages >>"$log" 2>&1; then
    tail -n 20 "$log" >&2
    die "apt could not resolve or fetch the packages; log: $log"
fi

# --- unpack ---------------------------------------------------------------------------------------
root=$folder/sysroot.new
mkdir -p "$root/usr/bin" "$root/usr/lib" "$root/usr/lib64" "$root/usr/sbin"
for name in bin lib lib64 sbin; do
    ln -s "usr/$name" "$root/$name"
done
echo "# $found" >"$folder/versions.new"
for file in "$apt"/cache/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$file" | tar -x -C "$root" --keep-directory-symlink --no-same-owner \
        --exclude='./usr/share/doc' --exclude='./usr/share/man' --exclude='./usr/share/locale' \
        --exclude='./usr/share/i18n' --exclude='./usr/lib/*/gconv' --exclude='./usr/share/perl' \
        --exclude='./var' --exclude='./etc/init.d' 2>>"$log" ||
        die "cannot unpack $file; log: $log"
    dpkg-deb -f "$file" Package Version | sed 's/^[A-Za-z]*: //' | paste -s -d' ' \
        >>"$folder/versions.new"
done

loader=$(cd "$root" && find usr/lib usr/lib64 -name 'ld-linux*.so.*' | sort | head -n 1)
[ -n "$loader" ] || die "libc6 came without a dynamic loader"
lvp=$(cd "$root" && find usr/lib -name 'libvulkan_lvp.so' | head -n 1)
[ -n "$lvp" ] || die "mesa-vulkan-drivers came without lavapipe (libvulkan_lvp.so)"
lib=$(dirname "$lvp")
api=$(sed -n 's/.*"api_version": *"\([0-9.]*\)".*/\1/p' \
    $(find "$root/usr/share/vulkan/icd.d" -name 'lvp_icd*.json' | head -n 1))

# Links of packages point to absolute places; make those within the folder relative.
find "$root" -type l | while read -r link; do
    target=$(readlink "$link")
    case $target in
    /*) if [ -e "$root$target" ]; then ln -sfnr "$root$target" "$link"; fi ;;
    esac
done

# A library with a RUNPATH of its own would hide the run path of the program that loads it.
find "$root/$lib" -maxdepth 1 -name '*.so*' -type f | while read -r library; do
    if [ -n "$(patchelf --print-rpath "$library" 2>/dev/null)" ]; then
        patchelf --remove-rpath "$library"
    fi
done

rm -rf "$folder/sysroot" "$folder/bin" "$folder/layers"
mv "$root" "$folder/sysroot"
ln -sfn "sysroot/$loader" "$folder/loader"
ln -sfn "sysroot/$lib" "$folder/lib"
ln -sfn sysroot/usr/include "$folder/include"
mkdir -p "$folder/bin" "$folder/layers"
ln -s ../sysroot/usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json "$folder/layers/"
for program in glslc spirv-val spirv-opt spirv-dis spirv-as glslangValidator; do
    [ -x "$folder/sysroot/usr/bin/$program" ] || continue
    cat >"$folder/bin/$program" <<END
#!/bin/sh
# Runs $program of this folder through this folder's dynamic loader.
here=\$(dirname "\$(readlink -f "\$0")")/..
unset LD_PRELOAD
exec "\$here/loader" --library-path "\$here/lib" "\$here/sysroot/usr/bin/$program" "\$@"
END
    chmod +x "$folder/bin/$program"
done
if [ -d "$folder/sysroot/usr/lib/python3/dist-packages/safetensors" ]; then
    cat >"$folder/bin/python3" <<END
#!/bin/sh
# Runs this folder's Python through this folder's dynamic loader.
here=\$(dirname "\$(readlink -f "\$0")")/..
unset LD_PRELOAD PYTHONPATH
PYTHONHOME=\$here/sysroot/usr PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONHOME PYTHONNOUSERSITE PYTHONDONTWRITEBYTECODE
exec "\$here/loader" --library-path "\$here/lib:\$here/lib/blas:\$here/lib/lapack" \\
    "\$here/sysroot/usr/bin/python3" "\$@"
END
    chmod +x "$folder/bin/python3"
    "$folder/bin/python3" -c 'import safetensors.numpy' >>"$log" 2>&1 ||
        die "the unpacked Python does not load safetensors; log: $log"
fi
# Two names: VK_LOADER_DRIVERS_DISABLE='lvp_icd*' hides the distribution's driver but not ours.
for name in lvp_icd bellows_lavapipe; do
    cat >"$folder/$name.json" <<END
{
    "file_format_version": "1.0.1",
    "ICD": { "library_path": "./sysroot/$lvp", "api_version": "${api:-1.4.0}" }
}
END
done

"$folder/bin/glslc" --version >>"$log" 2>&1 || die "the unpacked glslc does not run; log: $log"
"$folder/bin/spirv-val" --version >>"$log" 2>&1 || die "the unpacked spirv-val does not run; log: $log"
sort "$folder/versions.new" >"$folder/versions.txt"
rm -rf "$folder/versions.new" "$apt"
echo "$stamp" >"$folder/stamp"
for package in glslc spirv-tools libvulkan-dev libvulkan-memory-allocator-dev libvulkan-volk-dev \
    mesa-vulkan-drivers; do
    echo "toolchain: $(grep "^$package " "$folder/versions.txt")"
done
