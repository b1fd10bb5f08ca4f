//! What surrounds the program: its control group, what its starter does with signals, its own file, a host without this or that.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::json;

/// What a line of `bash` gave that runs the program as `"$0"`.
#[derive(Debug)]
struct Shell {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn prepared(mut command: Command, line: &str) -> Shell {
    command.args(["-c", line, env!("CARGO_BIN_EXE_kvx")]);
    command.env_remove("KVX_BACKEND").env_remove("KVX_BACKEND_OPTIONS");
    let output = command.output().unwrap();
    Shell {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn shell(line: &str) -> Shell {
    prepared(Command::new("bash"), line)
}

/// As [`shell`], in namespaces of its own; `None` where this user may not have any.
fn apart(namespace: &str, line: &str) -> Option<Shell> {
    let flags = ["--user", "--map-root-user", namespace];
    let allowed = Command::new("unshare").args(flags).arg("true").output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        println!("skipped: this user may not have {namespace} apart");
        return None;
    }
    let mut command = Command::new("unshare");
    command.args(flags).arg("bash");
    Some(prepared(command, line))
}

const DEMO: &str = "demo --requests 1 --max-tokens 20";
const BENCH: &str = "bench --tokens 16 --rounds 1 --small 2";

/// A control group of this test's own, removed with it.
struct Group(PathBuf);

impl Group {
    /// `None`, with the reason printed, where none can be made.
    fn new(name: &str) -> Option<Self> {
        let name = format!("kvx-{name}-{}", std::process::id());
        for (root, must) in
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let group = Self(Path::new(root).join(&name));
            // Not even a directory where there is no such version: it is removed in any case.
            if fs::create_dir(&group.0).is_ok() && group.0.join(must).exists() {
                return Some(group);
            }
        }
        println!("skipped: no control group for memory can be made here");
        None
    }

    fn run(&self, limit: &str, line: &str) -> Shell {
        for file in ["memory.limit_in_bytes", "memory.max"] {
            if self.0.join(file).exists() {
                fs::write(self.0.join(file), limit).unwrap();
            }
        }
        // Nothing is swapped out instead.
        if self.0.join("memory.swap.max").exists() {
            fs::write(self.0.join("memory.swap.max"), "0").unwrap();
        }
        shell(&format!("echo $$ > {}/cgroup.procs && exec \"$0\" {line}", self.0.display()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Those that ended a moment ago may still be in it.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() || !self.0.exists() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// The system ends whoever takes more, without a word.
#[test]
fn a_demo_fits_into_its_control_group_or_refuses() {
    let Some(group) = Group::new("demo") else { return };
    for limit in ["96M", "256M", "384M", "512M", "1G"] {
        for line in [
            "demo --requests 2 --max-tokens 300",
            "demo --requests 20",
            "demo --requests 20 --memory 4G",
            "demo --requests 4 --max-tokens 4000 --full-size",
        ] {
            let run = group.run(limit, line);
            let said = &run.stderr;
            assert!(matches!(run.code, Some(0 | 3)), "{limit}, {line}: {run:?}");
            let named = said.contains("limits.memory") && said.contains("control group");
            assert!(run.code == Some(0) || named, "{limit}, {line}: {run:?}");
            println!("{limit}, {line}: {:?} {said}", run.code);
        }
    }
    assert_eq!(group.run("256M", "demo --requests 2 --max-tokens 300").code, Some(0));
    let run = group.run("1G", "demo --requests 20");
    assert!(run.code == Some(0) && run.stdout.contains("scaled"), "{run:?}");
}

#[test]
fn a_benchmark_fits_into_its_control_group_or_refuses() {
    let Some(group) = Group::new("bench") else { return };
    for limit in ["64M", "256M", "512M", "1G"] {
        for line in [
            BENCH,
            "bench --tokens 300 --rounds 1 --small 2",
            // Each of eight that meet it has a copy of the one.
            "bench --tokens 300 --rounds 1 --small 2 --producer tp=1 --consumer tp=8",
        ] {
            let run = group.run(limit, line);
            assert!(matches!(run.code, Some(0 | 3)), "{limit}, {line}: {run:?}");
            let named = run.stderr.contains("limits.memory");
            assert!(run.code == Some(0) || named, "{limit}, {line}: {run:?}");
            println!("{limit}, {line}: {:?} {}", run.code, run.stderr);
        }
    }
}

/// As a program that forgets its children, and hands that on.
#[test]
fn a_starter_that_ignores_its_childrens_ends_changes_nothing() {
    for line in [DEMO, BENCH, &format!("{BENCH} --peer-command 'while read x; do echo 1; done'")] {
        let run = shell(&format!("trap '' CHLD; exec \"$0\" {line}"));
        assert_eq!(run.code, Some(0), "{line}: {run:?}");
    }
}

/// What the program starts has the system's own ways of taking signals.
#[test]
fn a_program_that_is_compared_with_has_the_usual_signals() {
    let peer = "while read x; do grep SigIgn /proc/self/status >&2; echo 1; done";
    let run = shell(&format!("trap '' CHLD; exec \"$0\" {BENCH} --peer-command '{peer}'"));
    assert_eq!(run.code, Some(0), "{run:?}");
    let ignored = run.stderr.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
    // SIGCHLD and SIGXFSZ.
    assert_eq!(ignored & (1 << 16 | 1 << 24), 0, "{ignored:x}");
}

#[test]
fn output_that_gets_too_large_for_its_file_is_an_error() {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let place = place.join(format!("output-{}", std::process::id()));
    for line in [DEMO, "--json backends --options", "plan --producer tp=2 --consumer tp=4"] {
        let run = shell(&format!("ulimit -f 1; exec \"$0\" {line} > {}", place.display()));
        let _old = fs::remove_file(&place);
        assert_eq!(run.code, Some(1), "{line}: {run:?}");
        assert!(run.stderr.contains("standard output cannot be written"), "{line}: {run:?}");
        assert!(run.stderr.contains("ulimit -f"), "{line}: {run:?}");
    }
}

/// Half a key would be taken for one that is there.
#[cfg(target_os = "linux")]
#[test]
fn a_key_that_cannot_be_written_is_not_there() {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("half-{}", std::process::id()));
    let run = shell(&format!("ulimit -f 0; exec \"$0\" key {}", place.display()));
    assert_ne!(run.code, Some(0), "{run:?}");
    assert!(!run.stderr.is_empty() && !place.exists(), "{run:?}");
}

#[test]
fn a_picture_that_gets_too_large_is_an_error() {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let place = place.join(format!("large-{}.svg", std::process::id()));
    let plan = "plan --producer tp=2 --consumer tp=4";
    let run = shell(&format!("ulimit -f 1; exec \"$0\" {plan} --svg {}", place.display()));
    assert!(!place.exists(), "{run:?}");
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.stderr.contains("ulimit -f"), "{run:?}");
}

/// The mock, which nobody named, is no answer.
#[test]
fn a_benchmark_says_why_no_backend_can_be_used() {
    let run = shell(&format!("ulimit -f 2; exec \"$0\" {BENCH}"));
    assert_eq!(run.code, Some(3), "{run:?}");
    assert!(run.stderr.contains("ulimit -f"), "{run:?}");
    assert!(!run.stderr.contains("one process only"), "{run:?}");
    let run = shell(&format!("exec \"$0\" {BENCH} --backend mock"));
    assert!(run.code == Some(3) && run.stderr.contains("one process only"), "{run:?}");
    let line = format!("umount -l /proc && exec \"$0\" {BENCH}");
    let Some(run) = apart("--mount", &line) else { return };
    assert!(!run.stderr.contains("one process only"), "{run:?}");
    if run.stderr.starts_with("umount:") {
        println!("skipped: this user may not unmount /proc");
        return;
    }
    assert_eq!(run.code, Some(3), "{run:?}");
    assert!(run.stderr.contains("mount /proc"), "{run:?}");
}

#[test]
fn a_limit_on_data_is_named_by_a_benchmark() {
    for kibibytes in (100_000..300_000).step_by(30_000) {
        for region in ["shared", "borrowed"] {
            let line = format!("exec \"$0\" {BENCH} --region {region}");
            let run = shell(&format!("ulimit -d {kibibytes}; {line}"));
            let named = run.code == Some(3) && run.stderr.contains("ulimit -d");
            assert!(run.code == Some(0) || named, "{kibibytes} {region}: {run:?}");
        }
    }
}

/// As by an upgrade.
#[test]
fn a_program_whose_file_is_gone_goes_on() {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let place = place.join(format!("gone-{}", std::process::id()));
    let peer = "--peer-command 'while read x; do echo 1; done'";
    for line in [DEMO, &format!("{BENCH} {peer}")] {
        let place = place.display();
        let run = shell(&format!(
            "cp \"$0\" {place} && exec 9<{place} && rm {place} && exec /proc/self/fd/9 {line}"
        ));
        assert_eq!(run.code, Some(0), "{line}: {run:?}");
    }
}

#[test]
fn a_pool_that_is_too_small_is_told_by_the_number_that_was_given() {
    let run = shell("exec \"$0\" demo --producer blocks=1 --requests 2 --max-tokens 100");
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("(blocks=1, needed=8"), "{run:?}");
    assert!(run.stderr.contains("give blocks=8 or more"), "{run:?}");
    let run = shell("exec \"$0\" bench --producer blocks=1 --tokens 100");
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("too few blocks: 1 of 16 tokens"), "{run:?}");
}

#[test]
fn the_doctor_looks_at_the_loopback() {
    let checks = json("doctor", 0)["checks"].clone();
    let is = |check: &&serde_json::Value| check["check"] == "loopback" && check["state"] == "ok";
    assert_eq!(checks.as_array().unwrap().iter().filter(is).count(), 1, "{checks}");
    let Some(run) = apart("--net", "exec \"$0\" doctor") else { return };
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.stdout.contains("ip link set lo up"), "{run:?}");
}
