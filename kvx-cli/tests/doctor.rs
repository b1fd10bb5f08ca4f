//! What `kvx doctor` says of hosts of all sorts: trees of files in the place of `/proc`, `/sys` and `/dev`.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::{command, json, kvx};

/// A directory with these files, of this test's own.
fn tree(name: &str, files: &[(&str, &str)]) -> PathBuf {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("doctor-{name}-{}", std::process::id()));
    let _old = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(&root).unwrap();
    for (path, text) in files {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    root
}

/// What it says of a tree: state and words of the one finding of a check whose words have all of these.
struct Said(Value);

impl Said {
    fn of(root: &Path, code: i32) -> Self {
        let said = json(&format!("doctor --root {}", root.display()), code);
        assert_eq!(said["failures"].as_u64().unwrap() > 0, code == 1, "{said}");
        for finding in said["checks"].as_array().unwrap() {
            // What is not as it should be has a remedy, and nothing else has.
            assert_eq!(finding["state"] != "ok", finding["remedy"].is_string(), "{finding}");
        }
        std::fs::remove_dir_all(root).unwrap();
        Self(said)
    }

    fn has(&self, check: &str, state: &str, words: &[&str]) {
        let is = |finding: &&Value| {
            let text = format!("{} {}", finding["found"], finding["remedy"]);
            finding["check"] == check
                && finding["state"] == state
                && words.iter().all(|word| text.contains(word))
        };
        let found = self.0["checks"].as_array().unwrap().iter().filter(is).count();
        assert_eq!(found, 1, "{check} {state} {words:?}: {:#}", self.0);
    }
}

const LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units
Max open files            65536                65536                files
Max locked memory         unlimited            unlimited            bytes
";
const GID: &str = "fe80:0000:0000:0000:5e25:73ff:fe00:0001";
const GID_V4: &str = "0000:0000:0000:0000:0000:ffff:0a00:0001";
const NONE: &str = "0000:0000:0000:0000:0000:0000:0000:0000";
const PREFIX_ALONE: &str = "fe80:0000:0000:0000:0000:0000:0000:0000";
const PORT: &str = "sys/class/infiniband/mlx5_0/ports/1";

/// A card with RoCE that is all right, and what is changed of it: a file without text is left out.
fn roce(name: &str, changes: &[(&str, &str)]) -> PathBuf {
    let port = |file: &str| format!("{PORT}/{file}");
    let mut files: Vec<(String, String)> = [
        ("proc/self/limits".to_owned(), LIMITS),
        ("dev/infiniband/uverbs0".to_owned(), "x"),
        (port("state"), "4: ACTIVE\n"),
        (port("link_layer"), "Ethernet\n"),
        (port("rate"), "100 Gb/sec (4X EDR)\n"),
        (port("gids/0"), GID),
        (port("gids/1"), GID_V4),
        (port("gids/2"), NONE),
        (port("gid_attrs/types/0"), "IB/RoCE v1\n"),
        (port("gid_attrs/types/1"), "RoCE v2\n"),
    ]
    .map(|(path, text)| (path, text.to_owned()))
    .into();
    for (path, text) in changes {
        files.retain(|(known, _)| known != path);
        if !text.is_empty() {
            files.push(((*path).to_owned(), (*text).to_owned()));
        }
    }
    let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (&**path, &**text)).collect();
    tree(name, &files)
}

#[test]
fn a_host_that_is_as_it_should_be_has_nothing_against_it() {
    let said = Said::of(&roce("good", &[]), 0);
    assert_eq!((&said.0["warnings"], &said.0["failures"]), (&0.into(), &0.into()), "{:#}", said.0);
    said.has("RDMA", "ok", &["mlx5_0 port 1", "RoCE", "ACTIVE", "100 Gb/sec", "GID 1 is RoCE v2"]);
    said.has("RDMA", "ok", &["1 device can be opened"]);
    said.has("memlock", "ok", &["unlimited"]);
    said.has("GPU direct", "ok", &["no driver"]);
    let said = Said::of(&tree("none", &[("proc/self/limits", LIMITS)]), 0);
    said.has("RDMA", "ok", &["no device", "TCP"]);
}

#[test]
fn cards_that_cannot_be_used_are_named_with_the_remedy() {
    let port = |file: &str| format!("{PORT}/{file}");
    let said = Said::of(&roce("down", &[(&port("state"), "1: DOWN")]), 0);
    said.has("RDMA", "warning", &["mlx5_0 port 1", "is DOWN", "devices="]);
    let bare = [(&*port("gids/0"), NONE), (&*port("gids/1"), PREFIX_ALONE)];
    Said::of(&roce("gidless", &bare), 1).has("RDMA", "failure", &["no GID", "address"]);
    let old = [(&*port("gid_attrs/types/1"), "IB/RoCE v1")];
    Said::of(&roce("v1", &old), 0).has("RDMA", "warning", &["none of its GIDs is RoCE v2"]);
    let none = [("dev/infiniband/uverbs0", "")];
    Said::of(&roce("hidden", &none), 1).has(
        "RDMA",
        "failure",
        &["/dev/infiniband", "device plugin"],
    );
    let infiniband =
        [(&*port("link_layer"), "InfiniBand"), (&*port("gids/0"), NONE), (&*port("gids/1"), NONE)];
    Said::of(&roce("subnet", &infiniband), 1).has("RDMA", "failure", &["subnet manager"]);
    let infiniband = [(&*port("link_layer"), "InfiniBand")];
    Said::of(&roce("ib", &infiniband), 0).has("RDMA", "ok", &["InfiniBand", "GID 0"]);
    let empty = tree(
        "portless",
        &[("sys/class/infiniband/hfi1_0/node_type", "1"), ("dev/infiniband/uverbs0", "x")],
    );
    Said::of(&empty, 0).has("RDMA", "warning", &["hfi1_0 has no port"]);
}

#[test]
fn a_device_that_this_user_may_not_open_is_a_failure() {
    let root = roce("closed", &[]);
    let device = root.join("dev/infiniband/uverbs0");
    std::fs::set_permissions(&device, std::fs::Permissions::from_mode(0o000)).unwrap();
    // Root may open what it likes.
    if std::fs::File::open(&device).is_ok() {
        eprintln!("skipped: this user may open what nobody may");
        std::fs::remove_dir_all(root).unwrap();
        return;
    }
    Said::of(&root, 1).has("RDMA", "failure", &["may not open /dev/infiniband/uverbs0"]);
}

/// Known failures of deployments: registration fails because memory may not be pinned.
#[test]
fn a_limit_on_locked_memory_matters_where_there_is_rdma() {
    let limits = "Max locked memory         65536                65536                bytes\n\
                  Max open files            1024                 4096                 files\n";
    let said = Said::of(&roce("locked", &[("proc/self/limits", limits)]), 1);
    said.has("memlock", "failure", &["64 KiB", "LimitMEMLOCK=infinity", "CAP_IPC_LOCK"]);
    said.has("open files", "warning", &["1,024", "ulimit -n"]);
    let capable = ("proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\n");
    let said = Said::of(&roce("lifted", &[("proc/self/limits", limits), capable]), 0);
    said.has("memlock", "ok", &["CAP_IPC_LOCK lifts that"]);
    let said = Said::of(&tree("plain", &[("proc/self/limits", limits)]), 0);
    said.has("memlock", "ok", &["no RDMA device"]);
}

#[test]
fn settings_of_the_kernel_are_told_with_what_they_mean() {
    let scope = |value| ("proc/sys/kernel/yama/ptrace_scope", value);
    let pages = "sys/kernel/mm/hugepages/hugepages-2048kB";
    let (all, free) = (format!("{pages}/nr_hugepages"), format!("{pages}/free_hugepages"));
    let clock = "sys/devices/system/clocksource/clocksource0/current_clocksource";
    let said =
        Said::of(&tree("one", &[scope("1"), (&all, "512"), (&free, "500"), (clock, "tsc\n")]), 0);
    said.has("ptrace scope", "warning", &["is 1", "one peer at a time", "ptracer=any"]);
    said.has("huge pages", "ok", &["500 of 512"]);
    said.has("clock", "ok", &["tsc"]);
    let said =
        Said::of(&tree("three", &[scope("3"), (&all, "512"), (&free, "0"), (clock, "hpet")]), 0);
    said.has("ptrace scope", "warning", &["is 3", "let kvx allocate"]);
    said.has("huge pages", "warning", &["all 512", "vm.nr_hugepages"]);
    said.has("clock", "warning", &["hpet", "system call"]);
    let said = Said::of(&tree("zero", &[scope("0"), (&all, "0")]), 0);
    said.has("ptrace scope", "ok", &["is 0"]);
    said.has("huge pages", "ok", &["none of 2 MiB"]);
}

#[test]
fn limits_of_containers_are_found_in_both_versions() {
    let second = [
        ("proc/self/cgroup", "0::/pod/engine\n"),
        ("sys/fs/cgroup/pod/engine/memory.max", "1073741824\n"),
        ("sys/fs/cgroup/pod/engine/cpu.max", "50000 100000\n"),
        ("sys/fs/cgroup/pod/engine/pids.max", "100\n"),
    ];
    let said = Said::of(&tree("second", &second), 0);
    said.has("memory limit", "warning", &["1 GiB"]);
    said.has("processor limit", "warning", &["0.5 processors"]);
    said.has("thread limit", "warning", &["allows 100", "podPidsLimit"]);
    // Inside of a container.
    let inside = [
        ("proc/self/cgroup", "0::/\n"),
        ("sys/fs/cgroup/memory.max", "max\n"),
        ("sys/fs/cgroup/cpu.max", "max 100000\n"),
        ("sys/fs/cgroup/pids.max", "4096\n"),
    ];
    let said = Said::of(&tree("inside", &inside), 0);
    said.has("memory limit", "ok", &["none"]);
    said.has("processor limit", "ok", &["none"]);
    said.has("thread limit", "ok", &["4,096"]);
    let first = [
        ("proc/self/cgroup", "4:memory:/jobs/1\n3:cpu,cpuacct:/jobs/1\n"),
        ("sys/fs/cgroup/memory/jobs/1/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/cpu/jobs/1/cpu.cfs_quota_us", "250000\n"),
        ("sys/fs/cgroup/cpu/jobs/1/cpu.cfs_period_us", "100000\n"),
    ];
    let said = Said::of(&tree("first", &first), 0);
    said.has("memory limit", "ok", &["none"]);
    said.has("processor limit", "ok", &["2.5 processors"]);
}

#[test]
fn gpus_are_reached_or_it_is_said_how() {
    let version = "proc/driver/nvidia/version";
    let closed = (version, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54\n");
    let open = (version, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54\n");
    let kernel = |release| ("proc/sys/kernel/osrelease", release);
    let peermem = ("sys/module/nvidia_peermem/refcnt", "0");
    let said = Said::of(&roce("peermem", &[closed, peermem]), 0);
    said.has("GPU direct", "ok", &["nvidia_peermem is loaded"]);
    let said = Said::of(&roce("unloaded", &[closed, kernel("6.1.0-13-amd64")]), 0);
    said.has("GPU direct", "warning", &["modprobe nvidia-peermem"]);
    let said = Said::of(&roce("dmabuf", &[open, kernel("6.1.0-13-amd64")]), 0);
    said.has("GPU direct", "ok", &["dma-buf", "6.1.0"]);
    let said = Said::of(&roce("old", &[open, kernel("5.4.0")]), 0);
    said.has("GPU direct", "warning", &["5.12"]);
    let said = Said::of(&tree("cardless", &[closed]), 0);
    said.has("GPU direct", "ok", &["no RDMA device"]);
}

#[test]
fn ports_and_keys_are_looked_at_where_they_are_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap();
    let key =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("doctor-{}.key", std::process::id()));
    let _old = std::fs::remove_file(&key);
    assert_eq!(kvx(&format!("key {}", key.display())).code, 0);
    let file = key.display().to_string();
    let look = |arguments: &str, code: i32| Said(json(&format!("doctor {arguments}"), code));
    let said = look(&format!("--listen 127.0.0.1:0 --key {file}"), 0);
    said.has("port", "ok", &["127.0.0.1 has a free port"]);
    said.has("key", "ok", &[&file, "owner alone"]);
    let said = look(&format!("--listen {port} --listen nonsense --listen 192.0.2.1:0"), 1);
    said.has("port", "failure", &[&port.to_string(), "ss -ltnp"]);
    said.has("port", "failure", &["there is no port"]);
    said.has("port", "failure", &["192.0.2.1: ", "address of this host"]);
    // As `kvx serve` has it: others are told to dial that.
    let said = look("--listen 0.0.0.0:5700 --listen [::]:0", 1);
    said.has("port", "failure", &["0.0.0.0:5700", "the other engine reaches this host"]);
    said.has("port", "failure", &["[::]:0", "the other engine reaches this host"]);
    let mode =
        |mode| std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o640);
    look(&format!("--key {file}"), 0).has("key", "warning", &["640", "--key-of-group"]);
    mode(0o644);
    look(&format!("--key {file}"), 1).has("key", "failure", &["644", "chmod 600"]);
    std::fs::remove_file(&key).unwrap();
    look(&format!("--key {file}"), 1).has("key", "failure", &[&file, "make a key"]);
    let run = kvx(&format!("doctor --key {file}"));
    assert!(run.code == 1 && run.stdout.contains("FAILURE") && run.stdout.contains("1 failure"));
}

/// The backend that the environment names is the one that is used: it is looked at with its options, and what is wrong with it is a
/// failure, as it was asked for.
#[cfg(feature = "mock")]
#[test]
fn the_backend_that_the_environment_names_is_looked_at() {
    let look = |name: &str, options: &str, code: i32| {
        let mut program = command("--json doctor");
        let output =
            program.env("KVX_BACKEND", name).env("KVX_BACKEND_OPTIONS", options).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{name} {options}: {output:?}");
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        let checks = said["checks"].as_array().unwrap().iter();
        assert_eq!(checks.filter(|finding| finding["check"] == "backend").count(), 1, "{said:#}");
        Said(said)
    };
    look("mock", "", 0).has("backend", "ok", &["mock, named by KVX_BACKEND"]);
    look("mock", "preset=efa,seed=77", 0).has("backend", "ok", &["KVX_BACKEND", "77"]);
    let wrong = ["mock", "nonsense", "mend the options in KVX_BACKEND_OPTIONS"];
    look("mock", "nonsense=1", 1).has("backend", "failure", &wrong);
    look("mock", "seed=1,", 1).has("backend", "failure", &["empty", "KVX_BACKEND_OPTIONS"]);
    look("nothing", "", 1).has("backend", "failure", &["nothing", "named_by=KVX_BACKEND"]);
    look("", "seed=1", 1).has("backend", "failure", &["set KVX_BACKEND beside"]);
}
