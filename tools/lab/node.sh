# PID 1 of a node, in new network, mount, UTS and PID namespaces: its own /dev/shm, /tmp, /proc and host name.
#     sh node.sh NAME FOLDER [SHARED_PATH_BELOW_TMP ...]
# FOLDER has the file `hosts` and the empty folder NAME.
set -e
name=$1 folder=$2
shift 2
read -r pid _ < /proc/self/stat # the number outside of the PID namespace, before /proc is replaced
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs "$folder/$name"
for path in "$@"; do
    mkdir -p "$folder/$name/${path#/tmp/}"
    mount --rbind "$path" "$folder/$name/${path#/tmp/}"
done
mount --rbind "$folder/$name" /tmp
hostname "$name"
trap '' CHLD # ignored by `sleep` too: the kernel then reaps orphans, which PID 1 inherits
echo "pid $pid"
exec sleep infinity > /dev/null 2>&1
