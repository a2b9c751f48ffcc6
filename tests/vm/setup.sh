#!/bin/bash
# Fetches what the test guest is made of: QEMU, a Linux kernel and an initramfs.
#
# Everything is unpacked under PENSTOCK_VM_DIR (default: build/vm) from the Debian mirror this
# machine already uses. Nothing is installed, so root is not needed and the machine stays as it was.
# Running it again does only what is missing; `rm -rf build/vm` starts over with fresh packages.
#
# Exit codes: 0 ready, 77 cannot be had on this machine (one line says why), 1 something broke.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
vm_dir=${PENSTOCK_VM_DIR:-$here/../../build/vm}

# Backports' QEMU, as Debian 12's own (7.2) crashes this guest about one boot in four.
# kmod resolves the order modules load in; busybox is the guest's user space before the host's
# file system is mounted, and packs the initramfs; dmsetup breaks the guest's disks.
readonly TOOL_PACKAGES=(
  qemu-system-x86 qemu-system-common qemu-system-data seabios busybox-static kmod dmsetup
)
# The first two carry the console, the next three the host's file system, then the CXL device, and
# disks and what breaks them.
readonly GUEST_MODULES=(
  virtio_pci virtio_console
  9pnet_virtio 9p overlay
  cxl_acpi cxl_pci cxl_mem cxl_port dax_cxl kmem
  nvme dm-mod dm-flakey dm-delay
)

cannot_be_had() {
  echo "vm setup: cannot be had here: $*" >&2
  exit 77
}

broken() {
  echo "vm setup: failed: $*" >&2
  exit 1
}

release_codename() {
  # shellcheck source=/dev/null
  (. /etc/os-release 2>/dev/null && [[ ${ID:-} == debian ]] && echo "${VERSION_CODENAME:-}") || true
}

# The mirror that serves this release, whichever file and format it is configured in.
configured_mirror() { # CODENAME
  # shellcheck disable=SC2016  # apt expands these names, not the shell
  apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(CODENAME)' 'Created-By: Packages' |
    awk -v release="$1" '$2 == release || $3 == release { print $1; exit }'
}

# apt with package lists of its own: the release and its backports, without touching the machine's.
write_apt_config() { # MIRROR CODENAME
  mkdir -p "$vm_dir"/apt/{lists,cache/archives}/partial
  cat > "$vm_dir/apt/debian.sources" <<END
Types: deb
URIs: $1
Suites: $2 $2-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
  cat > "$vm_dir/apt/apt.conf" <<END
Dir::Etc::sourcelist "$vm_dir/apt/debian.sources";
Dir::Etc::sourceparts "-";
Dir::State::lists "$vm_dir/apt/lists";
Dir::Cache "$vm_dir/apt/cache";
APT::Sandbox::User "root"; // else apt, as root, drops to a user that may not write here
APT::Update::Error-Mode "any"; // else an unreachable mirror is only a warning
END
}

prepare_apt() {
  local codename mirror problem
  [[ $(uname -m) == x86_64 ]] || cannot_be_had "the guest needs an x86_64 host, this is $(uname -m)"
  codename=$(release_codename)
  [[ -n $codename ]] || cannot_be_had "packages come from a Debian release, and this is not one"
  mirror=$(configured_mirror "$codename")
  [[ -n $mirror ]] || cannot_be_had "the apt sources name no mirror for Debian $codename"
  write_apt_config "$mirror" "$codename"
  problem=$(apt-get -c "$vm_dir/apt/apt.conf" -qq update 2>&1) ||
    cannot_be_had "Debian $codename and its backports are out of reach: ${problem%%$'\n'*}"
  backports=$codename-backports
}

# Names of the packages that installing PACKAGE... would bring to this machine.
missing_packages() { # PACKAGE...
  apt-get -c "$vm_dir/apt/apt.conf" -qq --simulate -o Debug::NoLocking=true \
    install --no-install-recommends --target-release "$backports" "$@" |
    awk '$1 == "Inst" { print $2 }'
}

# A rename at the end makes an interrupted download invisible to the next run.
unpack_packages() { # DIRECTORY PACKAGE...
  local target=$1 staging=$vm_dir/staging package
  shift
  rm -rf "$staging"
  mkdir -p "$staging"/{packages,root/usr/{bin,sbin,lib}}
  # Some packages still ship /lib and /sbin: merge them, so that each file has one place.
  ln -s usr/bin usr/sbin usr/lib "$staging/root/"
  (cd "$staging/packages" &&
    apt-get -c "$vm_dir/apt/apt.conf" -qq --target-release "$backports" download "$@") >&2
  for package in "$staging"/packages/*.deb; do
    dpkg-deb --fsys-tarfile "$package" |
      tar --extract --keep-directory-symlink --no-same-owner --directory "$staging/root"
  done
  mv "$staging/root" "$target"
  rm -rf "$staging"
}

fetch_tools() {
  local missing packages
  missing=$(missing_packages "${TOOL_PACKAGES[@]}") || broken "apt cannot resolve QEMU's packages"
  # Also those the machine has: its own may be older, and may be removed while ours is in use.
  mapfile -t packages < <(printf '%s\n' "${TOOL_PACKAGES[@]}" "$missing" | sort --unique)
  rm -rf "$vm_dir/tools"
  unpack_packages "$vm_dir/tools" "${packages[@]}"
  echo "${TOOL_PACKAGES[*]}" > "$vm_dir/tools/packages"
}

# A directory of an earlier setup may lack a tool that was added since.
tools_are_there() {
  [[ $(cat "$vm_dir/tools/packages" 2> /dev/null) == "${TOOL_PACKAGES[*]}" ]]
}

fetch_kernel() {
  local missing packages
  missing=$(missing_packages linux-image-amd64) || broken "apt cannot resolve the kernel's packages"
  # linux-image-amd64 is empty and names the image of the day; the rest is what installing it needs.
  mapfile -t packages < <(grep '^linux-' <<< "$missing")
  rm -rf "$vm_dir/kernel.new"
  unpack_packages "$vm_dir/kernel.new" "${packages[@]}"
  (cd "$vm_dir/kernel.new" && ln -s "$(find . -name 'vmlinuz*' -type f -print -quit)" vmlinuz)
  run_kmod_as depmod --basedir "$vm_dir/kernel.new" "$(kernel_release "$vm_dir/kernel.new")"
  mv "$vm_dir/kernel.new" "$vm_dir/kernel"
}

kernel_release() { # UNPACKED_KERNEL
  basename "$1"/usr/lib/modules/*
}

# kmod is depmod, modprobe and the like by the name it is called with; the package's links to it are
# absolute, so they lead out of the unpacked tree.
run_kmod_as() { # NAME ARGUMENT...
  (export LD_LIBRARY_PATH=$vm_dir/tools/usr/lib/x86_64-linux-gnu
    exec -a "$1" "$vm_dir/tools/usr/bin/kmod" "${@:2}")
}

module_files_in_load_order() {
  local module
  for module in "${GUEST_MODULES[@]}"; do
    run_kmod_as modprobe --dirname "$vm_dir/kernel" \
      --set-version "$(kernel_release "$vm_dir/kernel")" --show-depends "$module" || exit 1
  done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }'
}

build_initramfs() {
  local root=$vm_dir/initramfs busybox=$vm_dir/tools/usr/bin/busybox file name
  rm -rf "$root"
  mkdir -p "$root"/{bin,dev,proc,sys,control,host,overlay,newroot,modules}
  cp "$busybox" "$root/bin/"
  install -m 755 "$here/guest-init.sh" "$root/init"
  install -m 755 "$here/guest-cxl.sh" "$root/bin/guest-cxl"
  module_files_in_load_order > "$vm_dir/module-files" || broken "the kernel lacks a guest module"
  while read -r file; do
    name=$(basename "${file%.xz}")
    case $file in
      *.xz) "$busybox" unxz -c "$file" > "$root/modules/$name" ;;
      *) cp "$file" "$root/modules/$name" ;;
    esac
    echo "$name" >> "$root/modules/load-order"
  done < "$vm_dir/module-files"
  (cd "$root" && find . | "$busybox" cpio --quiet -o -H newc | gzip -1) > "$vm_dir/initramfs.gz.new"
  mv "$vm_dir/initramfs.gz.new" "$vm_dir/initramfs.gz"
}

initramfs_is_current() {
  local input
  for input in "$here"/{setup,guest-init,guest-cxl}.sh "$vm_dir"/{tools,kernel}; do
    [[ $vm_dir/initramfs.gz -nt $input ]] || return 1
  done
}

main() {
  mkdir -p "$vm_dir"
  vm_dir=$(cd "$vm_dir" && pwd -P)
  exec 9> "$vm_dir/lock"
  flock 9 # two launchers may start at once; the second waits and finds the work done
  if ! tools_are_there || [[ ! -d $vm_dir/kernel ]]; then
    prepare_apt
    tools_are_there || fetch_tools
    [[ -d $vm_dir/kernel ]] || fetch_kernel
  fi
  initramfs_is_current || build_initramfs
}

main
