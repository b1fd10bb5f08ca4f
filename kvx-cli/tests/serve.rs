//! Two engines in two processes, through the whole connector: `kvx key`, `kvx serve`.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{command, json, kvx};

/// Small enough for a test.
pub(crate) const SMALL: &str = "--layers 2 --pool-tokens 4000";

/// A key of this test's own.
pub(crate) fn key(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("serve-{name}-{}.key", std::process::id()));
    let _old = std::fs::remove_file(&path);
    let made = kvx(&format!("key {}", path.display()));
    assert_eq!(made.code, 0, "{made:?}");
    path
}

/// A producer in a process of its own. It is killed when dropped.
pub(crate) struct Producer {
    child: Child,
    /// Where requests are asked for, and where its cards are.
    pub(crate) address: String,
    cards: String,
    /// Where it shows its metrics, if it does.
    pub(crate) metrics: String,
    /// Its end of standard error is kept open.
    said: Option<BufReader<std::process::ChildStderr>>,
}

impl Producer {
    pub(crate) fn start(key: &Path, arguments: &str) -> Self {
        Self::run(command("--json serve --role producer"), "127.0.0.1", key, arguments)
    }

    fn run(mut program: Command, host: &str, key: &Path, arguments: &str) -> Self {
        program.args(["--listen", &format!("{host}:0"), "--key"]).arg(key);
        program.args(arguments.split_whitespace());
        let child = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (address, cards, metrics) = (String::new(), String::new(), String::new());
        let mut made = Self { child, address, cards, metrics, said: None };
        let mut said = BufReader::new(made.child.stderr.take().unwrap());
        let mut all = String::new();
        while made.address.is_empty() {
            let begin = all.len();
            assert!(said.read_line(&mut all).unwrap() > 0, "the producer ended: {all}");
            if let Some((_, at)) = all[begin..].split_once(": metrics at http://") {
                made.metrics = at.split('/').next().unwrap().to_owned();
            }
            if let Some(ready) = all[begin..].trim().strip_prefix("ready: requests at ") {
                let (address, cards) = ready.split_once(", cards at ").unwrap();
                (made.address, made.cards) = (address.to_owned(), cards.to_owned());
            }
        }
        made.said = Some(said);
        made
    }

    fn signal(&self, signal: &str) {
        let number = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &number]).status().unwrap().success());
    }

    /// Waits until it has ended by itself: its document.
    fn ended(mut self, code: i32) -> Value {
        let said = self.said.take();
        let begun = Instant::now();
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(begun.elapsed() < Duration::from_secs(30), "it does not end"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        drop(said);
        let mut text = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(status.code(), Some(code), "{text}");
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"))
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

pub(crate) fn consumer(address: &str, key: &Path, arguments: &str) -> String {
    format!("serve --role consumer --connect {address} --key {} {arguments}", key.display())
}

#[test]
fn a_key_is_made_once_and_only_for_its_owner() {
    let path = key("made");
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let secret = text.trim().strip_prefix("kvx-key-1:").unwrap();
    let again = kvx(&format!("key {}", path.display()));
    assert_eq!(again.code, 2, "{again:?}");
    assert!(again.stderr.contains("never overwritten"), "{again:?}");
    assert_eq!(again.stderr.matches("exists").count(), 1, "{again:?}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    std::fs::remove_file(&path).unwrap();
    let run = kvx(&format!("key {}", path.display()));
    for words in ["mode 0600", "Kubernetes", "kvx serve"] {
        assert!(run.stdout.contains(words), "{run:?}");
    }
    assert!(!run.stdout.contains(secret), "{run:?}");
    let nowhere = kvx("key no/such/folder/key");
    assert!(nowhere.code == 2 && nowhere.stderr.contains("no/such/folder"), "{nowhere:?}");
    assert_eq!(kvx("key -").code, 2);
    std::fs::remove_file(&path).unwrap();
}

#[cfg(feature = "shm")]
#[test]
fn two_processes_of_different_shapes_move_requests_and_verify_them() {
    let key = key("pair");
    let producer = Producer::start(&key, &format!("{SMALL} --once --tp 2 --name prefill"));
    let arguments = format!(
        "{SMALL} --tp 4 --shape layout=hnd,block=32 --requests 9 --tokens 700 --in-flight 3"
    );
    let report = json(&consumer(&producer.address, &key, &arguments), 0);
    assert_eq!(report["verified"], true, "{report}");
    assert_eq!((&report["requests"], &report["good"]), (&9.into(), &9.into()), "{report}");
    assert_eq!(report["producer_engine"], "prefill");
    // 700 tokens of 2 layers of 8 heads of 128 elements, keys and values.
    assert_eq!(report["bytes"], 9 * 700 * 2 * 8 * 128 * 2 * 2, "{report}");
    assert!(report["traffic"]["digests_equal"].as_u64().unwrap() >= 9, "{report}");
    for left in ["leases", "requests", "digests_differing"] {
        assert_eq!(report["traffic"][left], 0, "{report}");
    }
    for (number, row) in report["rows"].as_array().unwrap().iter().enumerate() {
        assert_eq!(row["request"], number, "{report}");
        assert_eq!(row["wrong"], 0);
        // Of each token, on every rank together: all heads of both layers, keys and values.
        assert_eq!(row["elements"], 700 * 2 * 8 * 128 * 2, "{report}");
        assert!(row["transports"][0].as_str().unwrap().starts_with("shm/"), "{report}");
    }
    let report = producer.ended(0);
    assert_eq!(report["leases"], serde_json::json!({ "done": 9 }), "{report}");
    assert_eq!((&report["good"], &report["consumers"]), (&9.into(), &1.into()), "{report}");
    std::fs::remove_file(&key).unwrap();
}

/// Known failures 15, 16, 17 and 76: what does not fit is refused by name, with both values, and the next is served.
#[cfg(feature = "shm")]
#[test]
fn what_does_not_fit_is_refused_by_name_and_the_next_consumer_is_served() {
    let (key_file, other) = (key("right"), key("wrong"));
    let producer = Producer::start(&key_file, &format!("{SMALL} --name prefill"));
    let few = "--requests 2 --wait 0 --layers 2";
    let ask = |address: &str, key: &Path, arguments: &str, code: i32, says: &[&str]| {
        let run = kvx(&consumer(address, key, &format!("{few} {arguments}")));
        assert_eq!(run.code, code, "{arguments}: {run:#?}");
        for says in says {
            let said = run.stdout.contains(says) || run.stderr.contains(says);
            assert!(said, "{arguments}: {says}: {run:#?}");
        }
        assert!(!run.stdout.contains("verified:") || run.stdout.contains("0 of 2"), "{run:#?}");
    };
    let (at, cards) = (&producer.address, &producer.cards);
    ask(at, &other, "", 1, &["same key"]);
    // What holds for every request is not tried for all of them.
    let refused = json(&consumer(at, &key_file, &format!("{few} --in-flight 1 --dtype f16")), 4);
    assert_eq!(refused["rows"].as_array().unwrap().len(), 1, "{refused}");
    ask(at, &key_file, "--in-flight 1 --dtype f16", 4, &["2 requests not fetched"]);
    let model = ["llama-3.1-8b", "gemma-3-4b", "head_dim: producer has 128, consumer has 256"];
    ask(at, &key_file, "--model gemma-3-4b", 4, &model);
    ask(at, &key_file, "--dtype f16", 4, &["kv_dtype: producer has bf16, consumer has f16"]);
    ask(
        at,
        &key_file,
        "--name prefill",
        2,
        &["have the same name (name=prefill)", "another --name"],
    );
    // Nobody listens at port 1 of this address.
    ask("127.0.0.2:1", &key_file, "", 1, &["nobody answers at 127.0.0.2:1"]);
    ask(cards, &key_file, "", 1, &["does not say that it is a producer", "requests at"]);
    ask(at, &key_file, "--tokens 4500 --pool-tokens 8000", 1, &["producer refuses", "pool"]);
    let good = json(&consumer(at, &key_file, &format!("{few} --tokens 100")), 0);
    assert_eq!(good["good"], 2, "{good}");
    producer.signal("-TERM");
    let report = producer.ended(0);
    assert_eq!(report["ended"], "terminated", "{report}");
    assert_eq!((&report["good"], &report["wrong"]), (&2.into(), &0.into()), "{report}");
    // The one with the other key.
    assert_eq!(report["strangers"], 1, "{report}");
    std::fs::remove_file(&key_file).unwrap();
    std::fs::remove_file(&other).unwrap();
}

#[test]
fn wrong_command_lines_are_refused() {
    let key = key("line");
    let file = key.display().to_string();
    std::fs::write(key.with_extension("open"), "kvx-key-1:").unwrap();
    for (arguments, says) in [
        ("--role producer", "--listen"),
        ("--role consumer --listen 127.0.0.1:0", "--connect"),
        ("--role producer --listen 0.0.0.0:0", "nobody can be told to dial"),
        ("--role producer --listen nonsense", "there is no port"),
        ("--role producer --listen 127.0.0.1:0 --shape dp=2", "one replica"),
        ("--role producer --listen 127.0.0.1:0 --layers 99", "has fewer"),
        ("--role producer --listen 127.0.0.1:0 --tp 0", "tp=0"),
        ("--role producer --listen 127.0.0.1:0 --tp 2 --shape tp=4", "one of the two"),
        ("--role producer --listen 127.0.0.1:0 --requests 3", "only the consumer"),
        ("--role producer --listen 127.0.0.1:0 --connect 127.0.0.1:1", "only the consumer"),
        ("--role consumer --connect 127.0.0.1:1 --once", "only the producer"),
    ] {
        let run = kvx(&format!("serve {arguments} --key {file}"));
        assert_eq!(run.code, 2, "{arguments}: {run:#?}");
        assert!(run.stderr.contains(says), "{arguments}: {run:#?}");
    }
    // A key's file that others can read.
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    let run = kvx(&format!("serve --role producer --listen 127.0.0.1:0 --key {file}"));
    assert!(run.code == 2 && run.stderr.contains("chmod 600"), "{run:#?}");
    std::fs::remove_file(&key).unwrap();
    std::fs::remove_file(key.with_extension("open")).unwrap();
}

/// A consumer that is killed in the midst of it leaves nothing behind: its leases are taken back, the next one is served, and
/// the producer ends at once when it is told to.
#[cfg(feature = "shm")]
#[test]
fn a_consumer_that_is_killed_leaves_no_lease_behind() {
    let key = key("killed");
    let producer = Producer::start(&key, SMALL);
    let many = format!("{SMALL} --requests 100000 --tokens 1500");
    let mut killed = command(&consumer(&producer.address, &key, &many));
    let mut killed = killed.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(killed.try_wait().unwrap().is_none(), "it ended early");
    killed.kill().unwrap();
    killed.wait().unwrap();
    let good = json(&consumer(&producer.address, &key, &format!("{SMALL} --requests 2")), 0);
    assert_eq!(good["good"], 2, "{good}");
    producer.signal("-INT");
    let report = producer.ended(0);
    assert_eq!((&report["ended"], &report["consumers"]), (&"interrupted".into(), &2.into()));
    assert_eq!((&report["wrong"], &report["failed"]), (&0.into(), &0.into()), "{report}");
    // Of each request it is known how it came out, or that nobody said.
    let said: u64 = ["good", "untold"].iter().map(|what| report[what].as_u64().unwrap()).sum();
    assert_eq!(report["requests"], said, "{report}");
    // Every lease has ended, and is counted.
    let leases = report["leases"].as_object().unwrap().values();
    let ended: u64 = leases.map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(report["requests"], ended, "{report}");
    std::fs::remove_file(&key).unwrap();
}

/// Its consumer keeps what it has, says what became of the rest, and ends soon: long before what it waits for is late, also where the
/// connector would wait for the producer's next life.
#[cfg(feature = "shm")]
#[test]
fn a_producer_that_ends_costs_its_consumer_no_result_and_no_wait() {
    let key = key("orphan");
    for (turn, signal) in ["-KILL", "-TERM", "-TERM", "-INT", "-TERM", "-TERM"].iter().enumerate() {
        let producer = Producer::start(&key, SMALL);
        let many = format!("--json {SMALL} --requests 100000 --tokens 1500 --deadline 60");
        let mut running = command(&consumer(&producer.address, &key, &many));
        let running = running.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(1500 + 37 * turn as u64));
        let begun = Instant::now();
        producer.signal(signal);
        let ended = running.wait_with_output().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(6), "{signal} {:?}", begun.elapsed());
        assert_eq!(ended.status.code(), Some(1));
        let report: Value = serde_json::from_slice(&ended.stdout).unwrap();
        assert_eq!(report["verified"], false);
        // Of those that were under way at the same time, what was still to be said to the producer.
        assert!(report["traffic"]["requests"].as_u64().unwrap() <= 4, "{signal} {report}");
        let rows = report["rows"].as_array().unwrap();
        let good = rows.iter().filter(|row| row["error"].is_null()).count();
        assert!(good > 0 && good < rows.len(), "{signal} {report}");
        assert_eq!(report["good"], good, "{report}");
        let said = String::from_utf8(ended.stderr).unwrap();
        let why = said.contains("the producer has gone") && said.contains("not fetched");
        assert!(why, "{signal} {said}");
    }
    std::fs::remove_file(&key).unwrap();
}

/// A pool that is always full is not taken for a producer that does not answer.
#[cfg(feature = "shm")]
#[test]
fn a_request_that_no_room_was_found_for_says_so() {
    let key = key("busy");
    let producer = Producer::start(&key, "--layers 2 --pool-tokens 600 --in-flight 1");
    let hold = format!("{SMALL} --requests 100000 --tokens 550 --in-flight 2 --deadline 1");
    let mut holder = command(&consumer(&producer.address, &key, &hold));
    let mut holder = holder.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let number = holder.id().to_string();
    let signal = |signal: &str| {
        assert!(Command::new("kill").args([signal, &number]).status().unwrap().success());
    };
    let one = consumer(
        &producer.address,
        &key,
        &format!("{SMALL} --requests 1 --tokens 550 --deadline 1"),
    );
    // While it stands still its request holds the pool, unless it is between two.
    let mut held = (0..20).map(|_| {
        std::thread::sleep(Duration::from_millis(300));
        signal("-STOP");
        let run = kvx(&one);
        signal("-CONT");
        run
    });
    let run = held.find(|run| run.code != 0).expect("it is held at some time");
    holder.kill().unwrap();
    holder.wait().unwrap();
    for says in ["the producer had no room in time", "--pool-tokens"] {
        assert!(run.stdout.contains(says), "{says}: {run:#?}");
    }
    std::fs::remove_file(&key).unwrap();
}

#[cfg(feature = "shm")]
#[test]
fn a_consumer_that_is_interrupted_gives_up_what_it_has_asked_for() {
    let key = key("interrupted");
    let producer = Producer::start(&key, &format!("{SMALL} --once"));
    let many = format!("--json {SMALL} --requests 100000 --tokens 1500");
    let mut running = command(&consumer(&producer.address, &key, &many));
    let mut running = running.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    let number = running.id().to_string();
    assert!(Command::new("kill").args(["-INT", &number]).status().unwrap().success());
    let mut text = String::new();
    running.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(running.wait().unwrap().code(), Some(1));
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&report["verified"], &report["traffic"]["requests"]), (&false.into(), &0.into()));
    let rows = report["rows"].as_array().unwrap();
    assert!(rows.iter().all(|row| row["error"].is_null()), "what was fetched was good");
    assert!(!rows.is_empty());
    let report = producer.ended(0);
    assert_eq!(report["ended"], "its consumer has gone", "{report}");
    std::fs::remove_file(&key).unwrap();
}

/// Where a library of UCX is: what `KVX_UCX_LIB` says, or what `./test tools` has fetched.
#[cfg(all(feature = "ucx", target_os = "linux"))]
pub(crate) fn ucx() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("KVX_UCX_LIB") {
        return Some(path.into());
    }
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/ucx/libucx-cu12");
    fetched.exists().then_some(fetched)
}

/// A network namespace, joined to this one's by a pair of virtual interfaces. Deleted, with them, when dropped.
#[cfg(all(feature = "ucx", target_os = "linux"))]
struct Namespace {
    name: String,
    /// Address of its end.
    there: String,
}

#[cfg(all(feature = "ucx", target_os = "linux"))]
impl Namespace {
    fn new() -> Result<Self, String> {
        let process = std::process::id();
        let (name, outside, inside) =
            (format!("kvxs{process}"), format!("so{process}"), format!("si{process}"));
        // Of a range that is set aside for tests.
        let block = process % 64 * 4;
        let (here, there) =
            (format!("198.19.254.{}", block + 1), format!("198.19.254.{}", block + 2));
        ip(&format!("netns add {name}"))?;
        let made = Self { name, there };
        let Self { name, there } = &made;
        ip(&format!("-n {name} link set lo up"))?;
        ip(&format!("link add {outside} type veth peer name {inside} netns {name}"))?;
        ip(&format!("addr add {here}/30 dev {outside}"))?;
        ip(&format!("link set {outside} up"))?;
        ip(&format!("-n {name} addr add {there}/30 dev {inside}"))?;
        ip(&format!("-n {name} link set {inside} up"))?;
        Ok(made)
    }
}

#[cfg(all(feature = "ucx", target_os = "linux"))]
impl Drop for Namespace {
    fn drop(&mut self) {
        // There is nobody to tell if it fails.
        let _ = ip(&format!("netns del {}", self.name));
    }
}

#[cfg(all(feature = "ucx", target_os = "linux"))]
fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output();
    let output = output.map_err(|error| format!("`ip` cannot be run: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!(
            "`ip {arguments}` failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}

/// As on two hosts: nothing but a network between them, and no backend is named.
#[cfg(all(feature = "ucx", target_os = "linux"))]
#[test]
fn two_network_namespaces_move_requests_over_ucx() {
    let Some(library) = ucx() else {
        eprintln!("skipped: there is no library of UCX; ./test tools fetches one");
        return;
    };
    let namespace = match Namespace::new() {
        Ok(namespace) => namespace,
        Err(reason) => {
            eprintln!("skipped: network namespaces cannot be had: {reason}");
            return;
        }
    };
    let key = key("namespace");
    let mut program = Command::new("ip");
    program.args(["netns", "exec", &namespace.name, env!("CARGO_BIN_EXE_kvx")]);
    program.args(["--json", "serve", "--role", "producer"]).env("KVX_UCX_LIB", &library);
    program.env_remove("KVX_BACKEND").env_remove("KVX_BACKEND_OPTIONS");
    // They share a host all the same, and UCX would read each other's memory through its kernel.
    program.env("UCX_TLS", "tcp");
    let arguments = format!("{SMALL} --once --tp 2");
    let producer = Producer::run(program, &namespace.there, &key, &arguments);
    let arguments = format!("--json {} {SMALL} --shape block=32 --requests 5 --tokens 300", {
        consumer(&producer.address, &key, "")
    });
    let mut program = command(&arguments);
    let output = program.env("KVX_UCX_LIB", &library).env("UCX_TLS", "tcp").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["verified"], &report["good"]), (&true.into(), &5.into()), "{report}");
    for row in report["rows"].as_array().unwrap() {
        assert!(row["transports"][0].as_str().unwrap().starts_with("ucx/tcp"), "{report}");
    }
    let report = producer.ended(0);
    assert_eq!(report["leases"], serde_json::json!({ "done": 5 }), "{report}");
    std::fs::remove_file(&key).unwrap();
}

/// A producer that has too few descriptors for its peers: it is said which limit, on which side, and nobody connects again and
/// again without pause, as thousands of lines a second would show.
#[cfg(all(feature = "shm", target_os = "linux"))]
#[test]
fn a_producer_with_too_few_descriptors_is_told_so_and_so_is_its_consumer() {
    let key = key("descriptors");
    let few = format!("{SMALL} --tp 4 --requests 3 --deadline 3 --wait 1 --backend shm");
    let mut served = 0;
    for limit in [40, 56, 62, 68, 74, 80, 86, 200] {
        let program = env!("CARGO_BIN_EXE_kvx");
        let key_path = key.display();
        let script = format!(
            "ulimit -n {limit} && exec {program} serve --role producer --listen 127.0.0.1:0 \
             --key {key_path} {SMALL} --tp 2 --backend shm"
        );
        let mut producer = Command::new("bash");
        producer.args(["-c", &script]).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut producer = producer.spawn().unwrap();
        let mut lines = BufReader::new(producer.stderr.take().unwrap()).lines();
        let mut said: Vec<String> = Vec::new();
        let address = loop {
            let Some(line) = lines.next() else { break None };
            said.push(line.unwrap());
            let ready = said.last().and_then(|line| line.strip_prefix("ready: requests at "));
            if let Some((address, _)) = ready.and_then(|ready| ready.split_once(',')) {
                break Some(address.to_owned());
            }
        };
        let Some(address) = address else {
            let said = said.join("\n");
            assert!(said.contains("ulimit -n"), "{limit}: {said}");
            assert_eq!(producer.wait().unwrap().code(), Some(3), "{limit}: {said}");
            continue;
        };
        let rest = std::thread::spawn(move || lines.map_while(Result::ok).collect::<Vec<_>>());
        let run = kvx(&consumer(&address, &key, &few));
        producer.kill().unwrap();
        producer.wait().unwrap();
        said.extend(rest.join().unwrap());
        served += u32::from(run.code == 0);
        let told = format!("{}{}", run.stdout, run.stderr);
        // Its sessions may not be taken, either: that is in the producer's log alone.
        let somewhere =
            said.iter().any(|line| line.contains("ulimit -n")) || told.contains("ulimit -n");
        assert!(run.code == 0 || somewhere, "{limit}: {told}\n{}", said.join("\n"));
        let count = said.len() + run.stderr.lines().count();
        assert!(count < 250, "{limit}: {count} lines, the last {:?}", said.last());
    }
    assert!(served > 0, "not even with 200");
    std::fs::remove_file(&key).unwrap();
}
