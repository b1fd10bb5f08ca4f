//! Ends of a demo in two processes: whatever becomes of one of them, the other ends, says why, and nothing is left.

use std::collections::BTreeSet;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rand::{RngExt as _, SeedableRng as _};

use crate::common::command;

/// A demo in the midst of its work, and its second process.
struct Running {
    first: Child,
    second: u32,
    /// Inodes of the sockets of both.
    sockets: BTreeSet<String>,
}

impl Running {
    fn start(mode: &str) -> Self {
        let arguments =
            format!("demo --backend shm --requests 20000 --max-tokens 2000 --mode {mode}");
        let mut first =
            command(&arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        within(Duration::from_secs(20), "the second process", || children(first.id()).len() == 1);
        let second = children(first.id())[0];
        // Into the middle of the work.
        std::thread::sleep(Duration::from_millis(1500));
        assert!(first.try_wait().unwrap().is_none(), "the demo ended early");
        let sockets = [first.id(), second].into_iter().flat_map(sockets).collect();
        Self { first, second, sockets }
    }

    /// The first process ends by itself, with an error, and the second with it.
    fn ends(self, limit: Duration) -> String {
        let begun = Instant::now();
        let Self { first, second, sockets } = self;
        let Output { status, stderr, .. } = first.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&stderr).into_owned();
        assert!(begun.elapsed() < limit, "{:?}: {said}", begun.elapsed());
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.starts_with("error: ") && said.lines().count() == 1, "{said}");
        nothing_is_left(second, &sockets);
        said
    }
}

/// Processes that this one has started.
fn children(process: u32) -> Vec<u32> {
    let path = format!("/proc/{process}/task/{process}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}

/// Inodes of a process's sockets.
fn sockets(process: u32) -> Vec<String> {
    let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
    let targets = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let inode = |target: std::path::PathBuf| {
        Some(target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
    };
    targets.filter_map(inode).collect()
}

fn is_alive(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // One that has ended and was not waited for yet is a zombie.
    !stat.is_empty() && !stat.contains(") Z ")
}

fn signal(process: u32, signal: &str) {
    let sent = Command::new("kill").args([signal, &process.to_string()]).status().unwrap();
    assert!(sent.success());
}

fn within(limit: Duration, what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < limit, "{what} took longer than {limit:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// No process, and none of their sockets. Memory has no name, and goes with the last process that has it.
fn nothing_is_left(second: u32, sockets: &BTreeSet<String>) {
    within(Duration::from_secs(5), "the end of the second process", || !is_alive(second));
    assert!(sockets.len() > 2, "{sockets:?}");
    within(Duration::from_secs(5), "the end of their sockets", || {
        let all = std::fs::read_to_string("/proc/net/unix").unwrap();
        let inodes = all.lines().filter_map(|line| line.split_whitespace().nth(6));
        inodes.filter(|inode| sockets.contains(*inode)).count() == 0
    });
}

/// Known failures of peers: a killed engine leaves the other waiting for ever, or processes and memory behind.
#[test]
fn when_the_second_process_is_killed_the_first_ends_and_says_so() {
    for mode in ["read", "write"] {
        let running = Running::start(mode);
        signal(running.second, "-KILL");
        let said = running.ends(Duration::from_secs(3));
        assert!(said.contains("the other engine's process is gone"), "{said}");
    }
}

#[test]
fn when_the_first_process_is_killed_the_second_goes_even_where_it_stands_still() {
    for stopped in [false, true] {
        let mut running = Running::start("read");
        if stopped {
            signal(running.second, "-STOP");
        }
        signal(running.first.id(), "-KILL");
        running.first.wait().unwrap();
        nothing_is_left(running.second, &running.sockets);
    }
}

/// It is noticed after five seconds of standing still, whatever the first process waits for.
#[test]
fn when_the_second_process_stands_still_the_first_ends_and_says_so() {
    for mode in ["read", "write"] {
        let running = Running::start(mode);
        signal(running.second, "-STOP");
        let said = running.ends(Duration::from_secs(12));
        assert!(said.contains("stands still") && said.contains("SIGSTOP"), "{said}");
    }
}

/// One that is stopped for a moment only, as by a debugger or at a terminal, is waited for.
#[test]
fn a_process_that_goes_on_is_waited_for() {
    let mut running = Running::start("read");
    for _ in 0..2 {
        signal(running.second, "-STOP");
        std::thread::sleep(Duration::from_secs(3));
        signal(running.second, "-CONT");
        std::thread::sleep(Duration::from_millis(500));
    }
    assert!(running.first.try_wait().unwrap().is_none(), "it was given up");
    signal(running.first.id(), "-KILL");
    running.first.wait().unwrap();
    nothing_is_left(running.second, &running.sockets);
}

/// Its processes are stopped between their turns, so that nothing of them ends by itself.
#[test]
fn a_program_that_is_compared_with_goes_with_a_benchmark_that_is_killed() {
    let place = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let place = place.join(format!("peer-{}", std::process::id()));
    let _old = std::fs::remove_file(&place);
    let script = format!(
        "sleep 1000 & echo $$ $! > {0}.new; mv {0}.new {0}; while read turn; do echo 1; done",
        place.display()
    );
    let mut bench = command("bench --backend shm --tokens 200 --rounds 10000 --small 5");
    bench.args(["--peer-command", &script]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut bench = bench.spawn().unwrap();
    within(Duration::from_secs(20), "the program", || place.exists());
    let numbers = std::fs::read_to_string(&place).unwrap();
    let numbers: Vec<u32> = numbers.split_whitespace().map(|n| n.parse().unwrap()).collect();
    assert!(numbers.len() == 2 && numbers.iter().all(|process| is_alive(*process)), "{numbers:?}");
    // Into the middle of its rounds.
    std::thread::sleep(Duration::from_millis(500));
    assert!(bench.try_wait().unwrap().is_none(), "the benchmark ended early");
    bench.kill().unwrap();
    bench.wait().unwrap();
    within(Duration::from_secs(5), "its end", || !numbers.iter().any(|process| is_alive(*process)));
    std::fs::remove_file(&place).unwrap();
}

/// Wherever a benchmark is when its other process ends: in times of one block, of counters, of notifications asleep or awake, or
/// beside copies. Each used to be waited for on its own, some for minutes.
#[test]
fn a_benchmark_notices_the_end_of_its_second_process_in_all_that_it_does() {
    let arguments = "bench --backend shm --tokens 64 --rounds 20 --small 4000";
    let start = || {
        let mut first = command(arguments);
        first.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let begun = Instant::now();
    assert!(start().wait_with_output().unwrap().status.success());
    let whole = begun.elapsed();
    let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    println!("seed {seed}, {whole:?} undisturbed");
    let mut moments = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let mut killed = 0;
    for turn in 0..12 {
        let first = start();
        within(Duration::from_secs(20), "the second process", || children(first.id()).len() == 1);
        let second = children(first.id())[0];
        std::thread::sleep(whole.mul_f64(moments.random_range(0.05..0.9)));
        if !is_alive(second) {
            continue;
        }
        let (how, limit) = if turn % 6 == 5 { ("-STOP", 12) } else { ("-KILL", 5) };
        let sent = Command::new("kill").args([how, &second.to_string()]).status().unwrap();
        let begun = Instant::now();
        let Output { status, stderr, .. } = first.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&stderr).into_owned();
        if !sent.success() || status.success() {
            continue;
        }
        killed += 1;
        assert!(
            begun.elapsed() < Duration::from_secs(limit),
            "{how} {:?}: {said}",
            begun.elapsed()
        );
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains("process is gone") || said.contains("stands still"), "{how}: {said}");
        within(Duration::from_secs(5), "the end of the second process", || !is_alive(second));
    }
    assert!(killed >= 6, "it had ended before {} of 12 moments", 12 - killed);
}

/// It works alone while it fills its memory, for seconds, and waits for nobody.
#[cfg(target_os = "linux")]
#[test]
fn a_process_that_works_alone_notices_the_end_of_the_other() {
    for json in ["", " --json"] {
        let arguments = "bench --backend shm --mode write --tokens 16384 --rounds 1";
        let mut first = command(&format!("{arguments}{json}"));
        let first = first.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let resident = || {
            let text = std::fs::read_to_string(format!("/proc/{}/statm", first.id())).unwrap();
            text.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap()
                * 4096
        };
        within(Duration::from_secs(60), "filling", || resident() > 200 << 20);
        let second = children(first.id())[0];
        signal(second, "-KILL");
        let begun = Instant::now();
        let Output { status, stdout, stderr } = first.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&stderr).into_owned();
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}: {said}", begun.elapsed());
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains("the other engine's process is gone"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        if !json.is_empty() {
            let document: serde_json::Value = serde_json::from_slice(&stdout).unwrap();
            assert_eq!(document["error"]["kind"], "peer", "{document}");
        }
        assert!(!is_alive(second));
    }
}

/// Runs `kvx` under a limit of the shell's, as `ulimit` sets it.
#[cfg(target_os = "linux")]
fn limited(limit: &str, arguments: &str) -> Output {
    let program = env!("CARGO_BIN_EXE_kvx");
    let script = format!("ulimit {limit} && exec {program} {arguments}");
    Command::new("bash").args(["-c", &script]).output().unwrap()
}

/// The kernel ends a process whose file would get too large, and memory with a descriptor counts as a file.
#[cfg(all(feature = "shm", target_os = "linux"))]
#[test]
fn limits_of_the_shell_are_named_with_what_to_raise() {
    let bench = "bench --backend shm --tokens 64 --rounds 1 --small 5";
    for (limit, arguments, remedy) in [
        ("-f 1024", bench, "ulimit -f"),
        ("-f 1024", "demo --requests 2 --volume 64M", "ulimit -f"),
        ("-n 6", bench, "ulimit -n"),
        ("-n 20", bench, "ulimit -n"),
        ("-n 6", "demo --requests 2 --volume 4M", "ulimit -n"),
    ] {
        let run = limited(limit, arguments);
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(said.contains(remedy), "{limit} {arguments}: {run:?}");
        assert!(!said.contains("panicked"), "{limit} {arguments}: {run:?}");
        assert_eq!(run.status.code(), Some(3), "{limit} {arguments}: {run:?}");
    }
}
