# Builds the image without Docker, on a base that mmdebstrap has made, and runs it: bash tests/image.sh FOLDER CHECKOUT
# Each run is process 1 of namespaces of its own, as in a container. BUILDAH_ARGS: what the build needs from this machine
# to reach a package index, such as --volume=/etc/pip.conf:/etc/pip.conf:ro
set -eux; cd $1
zoo() { buildah --root=$PWD/store --runroot=$PWD/runroot --storage-driver=overlay "$@"; }
build() { zoo bud --isolation=chroot --layers --build-arg=BASE=localhost/base --tag=zoo ${BUILDAH_ARGS-} context; }
trap 'zoo rm --all; zoo rmi --all --force' EXIT
mkdir context; tar -C $2 --exclude=.git --exclude='.venv*' --exclude=runs -c . | tar -C context -x
touch context/key.json context/data/.env
mmdebstrap --variant=minbase --include=ca-certificates bookworm base.tar
empty=$(zoo from scratch); zoo add $empty base.tar; zoo commit --rm $empty base; build
touch context/models/new.py context/requirements.txt
build | sed -n '/make install/,/COPY [.]/p' | grep 'Using cache'
config() { zoo inspect --type=image --format="{{$1}}" zoo; }
list() { config "range .OCIv1.Config.$1}}{{.}} {{end"; }
root=$(zoo mount $(zoo from zoo)); du -sm $root $root/xla-zoo/.venv
[ -f $root/xla-zoo/models/new.py -a ! -e $root/xla-zoo/key.json -a ! -e $root/xla-zoo/data/.env ]
within="$root env -i -C $(config .OCIv1.Config.WorkingDir) HOME=/home/zoo $(list Env)"
init="mount --make-rprivate /; for f in dev sys; do mount --rbind /\$f $root/\$f; done; mount -t proc proc $root/proc
exec chroot --userspec=$(config .OCIv1.Config.User) $within $(list Entrypoint) \"\$@\""
run() { exec unshare --mount --pid --fork --kill-child sh -c "$init" init "$@" >log 2>&1; }
(run MODEL=dlrm); grep 'finished in' log; [ -z "$(grep -E 'preload|pip install' log)" ]
code=0; (run MODEL=dlrm ARGS='--epochs x') || code=$?; [ $code = 2 ]
for words in 'new run' 'resuming after'; do
    run MODEL=dlrm NAME=long ARGS='--epochs 500' & sleep 1
    until grep 'step ' log; do kill -0 $!; sleep 0.2; done
    pkill -TERM --parent $!; code=0; wait $! || code=$?
    [ $code = 143 ]; grep "$words" log; grep ': saved; the same command resumes' log
done
