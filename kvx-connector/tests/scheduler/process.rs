//! A scheduler, and each worker in a process of its own: this program, started again. Bytes go through pipes.

use std::io::{BufRead, BufReader, Write as _};
use std::ops::Range;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kvx_connector::control::Key;
use kvx_connector::scheduler::{
    FinishStatus, Finishing, LoadFailed, Received, Request, SchedulerConfig, SchedulerConnector,
    WorkerReport,
};
use kvx_connector::ticket::Table;
use kvx_core::id::Incarnation;
use kvx_core::plan::BlockTable;
use serde_json::Value;

use crate::bytes;
use crate::kit::{PATIENCE, Shape, for_decode, id, seat};

const CHILD: &str = "KVX_TEST_WORKER";
/// Tells what a worker says from what its test runner prints.
const MARK: &str = "kvx:";

fn to_text(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_text(text: &str) -> Vec<u8> {
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

/// The next that the other side says.
fn next(from: &mut impl BufRead) -> Option<String> {
    let mut line = String::new();
    loop {
        line.clear();
        if from.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        if let Some((_, said)) = line.trim_end().split_once(MARK) {
            return Some(said.to_owned());
        }
    }
}

/// A worker's process, if this one was started to be one: it does what it is told until its input ends.
#[test]
fn worker() {
    let Ok(said) = std::env::var(CHILD) else { return };
    let words: Vec<&str> = said.split(' ').collect();
    let [name, tp, rank, life, key] = words[..] else { panic!("{said}") };
    let shape = Shape::new(tp.parse().unwrap(), 1, 16);
    let life = Incarnation::from_bytes(from_text(life).try_into().unwrap());
    let key = Key::from_bytes(from_text(key).try_into().unwrap());
    let layout = &shape.layouts()[rank.parse::<usize>().unwrap()];
    let seat = seat(name, life, layout, &shape, &key);
    let say = |text: String| {
        let mut output = std::io::stdout().lock();
        output.write_all(format!("{MARK}{text}\n").as_bytes()).unwrap();
        output.flush().unwrap();
    };
    say(format!("{} {}", seat.worker.address(), to_text(&seat.worker.handshake_metadata())));
    let mut input = std::io::stdin().lock();
    while let Some(order) = next(&mut input) {
        let words: Vec<&str> = order.split(' ').collect();
        let table = |text: &str| {
            let ids = text.split(',').map(|id| id.parse().unwrap()).collect();
            vec![Table { first: 0, ids }]
        };
        let (device, layout) = (&seat.device, &seat.layout);
        match words[..] {
            ["cards", ref cards @ ..] => {
                let cards: Vec<Vec<u8>> = cards.iter().map(|card| from_text(card)).collect();
                seat.worker.serve_cards(&cards).unwrap();
                say(String::new());
            }
            ["step", step] => {
                seat.worker.start_load(&from_text(step)).unwrap();
                seat.worker.wait_for_save();
                say(to_text(&seat.worker.take_report().encode().unwrap()));
            }
            ["write", ids, tokens, seed] => {
                let tokens: u64 = tokens.parse().unwrap();
                let (range, seed) = ((&(0..tokens), tokens), seed.parse().unwrap());
                bytes::write(layout, device, &table(ids), range, seed);
                say(String::new());
            }
            ["wrong", ids, tokens, seed] => {
                let tokens: u64 = tokens.parse().unwrap();
                let (range, seed) = ((&(0..tokens), tokens), seed.parse().unwrap());
                let (all, wrong) = bytes::wrong(layout, device, &table(ids), range, seed);
                assert!(all > 0);
                say(wrong.to_string());
            }
            ["open"] => {
                let (leases, loads) = seat.worker.open();
                say((leases + loads).to_string());
            }
            _ => panic!("{order}"),
        }
    }
}

/// A worker in a process of its own.
struct Far {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Far {
    fn start(arguments: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::worker", "--nocapture"])
            .env(CHILD, arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    fn hear(&mut self) -> String {
        next(&mut self.output).expect("the worker has ended")
    }

    fn ask(&mut self, order: &str) -> String {
        let input = self.child.stdin.as_mut().unwrap();
        input.write_all(format!("{MARK}{order}\n").as_bytes()).unwrap();
        self.hear()
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A scheduler, and its workers elsewhere.
struct Engine {
    c: SchedulerConnector,
    workers: Vec<Far>,
    begun: Instant,
    received: Vec<Received>,
    failed: Vec<LoadFailed>,
    sent: usize,
}

impl Engine {
    fn new(name: &str, tp: u32, key: [u8; 32], change: impl FnOnce(&mut SchedulerConfig)) -> Self {
        let shape = Shape::new(tp, 1, 16);
        let life = Incarnation::random().unwrap();
        let arguments =
            |rank| format!("{name} {tp} {rank} {} {}", to_text(life.as_bytes()), to_text(&key));
        let mut workers: Vec<Far> = (0..tp).map(|rank| Far::start(&arguments(rank))).collect();
        let said: Vec<String> = workers.iter_mut().map(Far::hear).collect();
        let said: Vec<(&str, &str)> = said.iter().map(|it| it.split_once(' ').unwrap()).collect();
        let layouts = shape.layouts();
        let (grid, groups) = (layouts[0].coords().grid, layouts[0].groups().to_vec());
        let cards = said[0].0.parse().unwrap();
        let mut config = SchedulerConfig::new(name.parse().unwrap(), cards, grid, groups);
        config.backoff = Duration::from_millis(10);
        change(&mut config);
        let mut c = SchedulerConnector::with_incarnation(config, life).unwrap();
        for (rank, (_, card)) in (0..).zip(said) {
            c.set_handshake_metadata(rank, from_text(card)).unwrap();
        }
        let cards: Vec<String> = c.cards().values().map(|card| to_text(card)).collect();
        for worker in &mut workers {
            worker.ask(&format!("cards {}", cards.join(" ")));
        }
        let (received, failed) = (Vec::new(), Vec::new());
        Self { c, workers, begun: Instant::now(), received, failed, sent: 0 }
    }

    fn step(&mut self) {
        let now = self.begun.elapsed();
        let step = to_text(&self.c.build_step(&[], now).unwrap().encode().unwrap());
        for rank in 0..self.workers.len() {
            let report = self.workers[rank].ask(&format!("step {step}"));
            let report = WorkerReport::decode(&from_text(&report)).unwrap();
            let updates = self.c.update(u16::try_from(rank).unwrap(), &report, now).unwrap();
            self.received.extend(updates.received);
            self.failed.extend(updates.failed);
            self.sent += updates.sent.len();
        }
    }

    fn ask_all(&mut self, order: &str) -> Vec<String> {
        self.workers.iter_mut().map(|worker| worker.ask(order)).collect()
    }

    /// A request is computed and published.
    fn prefill(&mut self, name: &str, ids: Range<u32>, tokens: u64) -> Value {
        let (id, params) = (id(name), for_decode());
        let request = Request { id: &id, prompt_tokens: tokens, params: Some(&params) };
        let ids: Vec<u32> = ids.collect();
        let tables = [BlockTable::new(&ids)];
        self.c.on_new_request(&request).unwrap();
        self.c.after_alloc(&id, &tables, 0).unwrap();
        self.step();
        self.ask_all(&format!("write {} {tokens} 5", list(&ids)));
        let status = FinishStatus::LengthCapped;
        let finishing = Finishing { status, tokens, blocks: &tables };
        let finished = self.c.request_finished(&request, &finishing).unwrap();
        assert!(finished.hold);
        finished.params.unwrap().into()
    }

    fn load(&mut self, name: &str, ids: Range<u32>, tokens: u64, params: &Value) {
        let id = id(name);
        let request = Request { id: &id, prompt_tokens: tokens, params: Some(params) };
        let ids: Vec<u32> = ids.collect();
        assert_eq!(self.c.matched_tokens(&request, 0).unwrap().tokens(), Some(tokens));
        self.c.after_alloc(&id, &[BlockTable::new(&ids)], tokens).unwrap();
    }

    fn finish(&mut self, name: &str) {
        let id = id(name);
        let request = Request { id: &id, prompt_tokens: 1, params: None };
        let finishing = Finishing { status: FinishStatus::Stopped, tokens: 0, blocks: &[] };
        assert!(!self.c.request_finished(&request, &finishing).unwrap().hold);
    }
}

fn list(ids: &[u32]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn within(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Known failures 40, 68, 72 and 73 (vllm#46283, vllm#49238, nixl#795, vllm#58063): each process has its own. A request goes from one engine to the
/// other; a producer's worker is killed, and the consumer's workers say so of what they loaded from it, and let go of it.
#[test]
fn a_scheduler_and_workers_in_processes_of_their_own() {
    let key: [u8; 32] = std::array::from_fn(|at| 3 + u8::try_from(at).unwrap());
    let mut p = Engine::new("prefill", 1, key, |_| {});
    let brief = |config: &mut SchedulerConfig| config.deadline = Duration::from_secs(2);
    let mut d = Engine::new("decode", 2, key, brief);
    let params = p.prefill("p", 3..6, 40);
    d.load("d", 20..23, 40, &params);
    within("received", || {
        p.step();
        d.step();
        assert!(d.failed.is_empty(), "{:?}", d.failed);
        !d.received.is_empty()
    });
    assert_eq!((d.received[0].request.as_str(), d.received[0].computed), ("d", 39));
    assert_eq!(d.ask_all("wrong 20,21,22 40 5"), ["0", "0"]);
    d.finish("d");
    within("sent", || {
        p.step();
        p.sent == 1
    });
    let params = p.prefill("p-2", 6..9, 40);
    p.step();
    p.workers.clear();
    d.load("d-2", 30..33, 40, &params);
    within("failed", || {
        d.step();
        assert_eq!(d.received.len(), 1);
        !d.failed.is_empty()
    });
    assert_eq!(d.failed[0].blocks, [(0, 30), (0, 31), (0, 32)].into());
    d.finish("d-2");
    within("let go", || {
        d.step();
        d.ask_all("open") == ["0", "0"]
    });
    assert!(d.c.tables().is_empty(), "{:?}", d.c.tables());
}
