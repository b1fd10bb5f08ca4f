//! Closing, and what it costs to be there.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvx_core::ErrorKind;
use kvx_core::backend::SEVER_BOUND;
use kvx_core::transfer::Mode;

use super::Group;
use super::handshake::greet;
use super::sever::{a_while, volley};
use super::shapes::modes;
use crate::suite::clause::{
    Breach, Clause, Point, Verdict, counts_memory, ensure, notes, refused, writes,
};
use crate::suite::world::World;

pub(crate) const GROUP: Group = Group {
    title: "Closing, and being there",
    about: "Nothing is left behind; and being there costs nothing.",
    clauses: &[
        Clause::new(
            "close.in_flight",
            Point::Closed,
            "`close` ends within the bound though transfers are in flight; each of them settles, once, then peers are down.",
            &["close_hangs", "close_forgets_transfers"],
            in_flight,
        )
        .needs(&[writes]),
        Clause::new(
            "close.again",
            Point::Closed,
            "Closing again does nothing.",
            &["closing_twice_fails"],
            again,
        ),
        Clause::new(
            "close.refuses",
            Point::Closed,
            "Once it is closed, everything that would begin something is refused as closed.",
            &["works_after_close"],
            refuses,
        ),
        Clause::new(
            "close.memory",
            Point::Closed,
            "Once it is closed, or dropped, it holds no memory any more, registered or in flight.",
            &["memory_never_released"],
            memory,
        ),
        Clause::new(
            "close.others_go_on",
            Point::Closed,
            "A side whose peer closed or was dropped can sever it within the bound, and goes on with others.",
            &["sever_never_settles", "sever_takes_all"],
            others_go_on,
        )
        .needs(&[writes, notes]),
        Clause::new(
            "close.after_notified",
            Point::Settled,
            "A transfer of which the peer was notified some time ago is done, also when the peer has closed before this side polls.",
            &["closing_fails_what_is_done"],
            after_notified,
        )
        .needs(&[writes, notes]),
        Clause::new(
            "close.memory_per_transfer",
            Point::Closed,
            "A transfer that has settled leaves no memory behind: thousands of them need no more than hundreds.",
            &["leaks_memory"],
            memory_per_transfer,
        )
        .needs(&[counts_memory, writes])
        .here_only()
        .once(),
        Clause::new(
            "close.threads",
            Point::Closed,
            "Backends that were closed, or dropped, leave no thread behind.",
            &["leaks_a_thread"],
            |world| nothing_left(world, "thread", &threads),
        )
        .needs(&[notes])
        .here_only(),
        Clause::new(
            "close.descriptors",
            Point::Closed,
            "Backends that were closed, or dropped, leave no file descriptor behind.",
            &["leaks_a_descriptor"],
            |world| nothing_left(world, "descriptor", &descriptors),
        )
        .needs(&[notes])
        .here_only(),
        Clause::new(
            "idle.costs_nothing",
            Point::Closed,
            "With nothing in flight it uses less than a hundredth of a processor.",
            &["burns_a_processor"],
            idle,
        )
        .needs(&[notes])
        .here_only(),
    ],
};

fn in_flight(world: &World) -> Verdict {
    for round in 0..4 {
        let pair = world.pair()?;
        let lane = world.lane(&pair, 2048)?;
        let back = world.lane(&pair.flipped(), 2048)?;
        let ids = volley(world, &lane, 40)?;
        volley(world, &back, 20)?;
        a_while(world, &pair)?;
        let begin = Instant::now();
        pair.one.close()?;
        ensure!(
            begin.elapsed() < SEVER_BOUND + Duration::from_secs(1),
            "round {round}: closing took {:?}",
            begin.elapsed()
        );
        let settled = || Ok(ids.iter().all(|id| pair.one.settled(*id).is_some()));
        world.wait(&[&pair.one], "transfers of a closed backend to settle", settled)?;
        let down = || Ok(pair.one.down(pair.at_one).is_some());
        world.wait(&[&pair.one], "the peer of a closed backend to be down", down)?;
        world.settle_down(&[&pair.one, &pair.other])?;
    }
    Ok(())
}

fn again(world: &World) -> Verdict {
    let pair = world.pair()?;
    for side in [&pair.one, &pair.other] {
        for _ in 0..3 {
            side.close()?;
        }
    }
    let never_used = world.open_here("third")?;
    never_used.close()?;
    never_used.close()
}

fn refuses(world: &World) -> Verdict {
    let pair = world.pair()?;
    let one = &pair.one;
    let arena = one.arena(64, 1)?;
    let offer = pair.other.offer()?;
    one.close()?;
    let closed = &[ErrorKind::Closed];
    refused("registering memory after closing", one.register(arena, 0, 64), closed)?;
    refused("an offer after closing", one.offer(), closed)?;
    refused("accepting an offer after closing", one.accept(&offer), closed)?;
    // The peer's handle may be stale already.
    let kinds = &[ErrorKind::Closed, ErrorKind::Misuse, ErrorKind::Peer];
    let post = one.submit(world.id(), pair.at_one, Mode::Write, &[], Some(&[]));
    refused("a notification after closing", post, kinds)?;
    one.poll(4)?;
    Ok(())
}

fn memory(world: &World) -> Verdict {
    for close in [true, false] {
        let pair = world.pair()?;
        let lane = world.lane(&pair, 2048)?;
        let spare = world.memory(&pair.one, 64)?;
        let mode = modes(&lane)?[0];
        for index in 0..8 {
            let segments = [lane.segment(index * 48, index * 48, 40)];
            if !pair.one.submit(world.id(), pair.at_one, mode, &segments, None)? {
                break;
            }
        }
        if close {
            pair.one.close()?;
        } else {
            pair.one.drop_backend()?;
        }
        let begin = Instant::now();
        for arena in [lane.local.arena, spare.arena] {
            while pair.one.held(arena)? > 0 {
                ensure!(
                    begin.elapsed() < SEVER_BOUND + Duration::from_secs(1),
                    "memory is held though the backend was {}",
                    if close { "closed" } else { "dropped" }
                );
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
    Ok(())
}

fn others_go_on(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    let friend = world.meet(&one, &world.open("third")?)?;
    for close in [true, false] {
        let pair = world.meet(&one, &world.open("other")?)?;
        let lane = world.lane(&pair, 2048)?;
        volley(world, &lane, 20)?;
        a_while(world, &pair)?;
        if close {
            pair.other.close()?;
        } else {
            pair.other.drop_backend()?;
        }
        if one.down(pair.at_one).is_none()
            && let Err(breach) = one.sever(pair.at_one)
        {
            refused::<()>("severing a peer that closed", Err(breach), &[ErrorKind::Misuse])?;
        }
        world.severed(&one, pair.at_one)?;
        greet(world, &friend)?;
        let mut lane = world.lane(&friend, 128)?;
        let segment = lane.segment(1, 2, 40);
        world.transfer(&mut lane, Mode::Write, &[segment], None)?;
        lane.check("after another peer went")?;
    }
    Ok(())
}

fn after_notified(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    for close in [true, false, true] {
        let pair = world.meet(&one, &world.open("other")?)?;
        let mut lane = world.lane(&pair, 256)?;
        let note = world.note(&one.capabilities()?, world.dice().next());
        let segments = [lane.segment(3, 5, 40)];
        let id = world.post(&one, pair.at_one, Mode::Write, &segments, Some(&note))?;
        // Only the peer polls: this side has not heard of the end when the peer goes.
        world.wait(&[&pair.other], "the notification", || Ok(!pair.other.notes().is_empty()))?;
        lane.apply(Mode::Write, &segments);
        lane.remote.check("when the notification was received")?;
        // The answer has time to reach this side, which still does not poll.
        world.settle_down(&[&pair.other])?;
        if close {
            pair.other.close()?;
        } else {
            pair.other.drop_backend()?;
        }
        world.done(&one, &[id])?;
    }
    Ok(())
}

/// Bytes of this process that are in memory.
fn resident() -> Verdict<u64> {
    let text = std::fs::read_to_string("/proc/self/status")
        .map_err(|error| Breach::new(format!("the kit cannot read /proc/self/status: {error}")))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes
        .map(|kibibytes| kibibytes << 10)
        .ok_or_else(|| Breach::new("/proc/self/status does not say VmRSS, the memory in use"))
}

fn memory_per_transfer(world: &World) -> Verdict {
    const HALF: u64 = 1000;
    /// Far more than the kit's own notes of a transfer need, and far less than a buffer of its own.
    const MOST: u64 = 16 << 10;
    let pair = world.pair()?;
    let lane = world.lane(&pair, 256)?;
    let burst = u64::from(pair.one.capabilities()?.limits.max_in_flight).min(50);
    // What is set up once is set up in the first half.
    let half = || -> Verdict<u64> {
        let before = resident()?;
        let mut count = 0;
        while count < HALF {
            let mut ids = Vec::new();
            for _ in 0..burst {
                let segments = [lane.segment(3, 5, 40)];
                ids.push(world.post(&pair.one, pair.at_one, Mode::Write, &segments, None)?);
            }
            world.done(&pair.one, &ids)?;
            count += burst;
        }
        Ok(resident()?.saturating_sub(before))
    };
    let (first, second) = (half()?, half()?);
    ensure!(
        second < HALF * MOST,
        "after {HALF} transfers, {HALF} more took another {second} bytes of memory for good (the first: {first})"
    );
    Ok(())
}

/// Two backends' lives: they are opened, meet, transfer, and end.
fn lives(world: &World, close: bool) -> Verdict {
    let pair = world.pair()?;
    greet(world, &pair)?;
    let mut lane = world.lane(&pair, 256)?;
    for mode in modes(&lane)? {
        let segment = lane.segment(0, 0, 40);
        world.transfer(&mut lane, mode, &[segment], None)?;
    }
    for side in [&pair.one, &pair.other] {
        if close {
            side.close()?;
        }
        side.drop_backend()?;
    }
    Ok(())
}

/// After the first lives, which may set up what a process needs once, no more is left after more lives.
fn nothing_left(
    world: &World,
    what: &str,
    count: &dyn Fn() -> Verdict<BTreeMap<String, usize>>,
) -> Verdict {
    lives(world, true)?;
    lives(world, false)?;
    let total = |counted: &BTreeMap<String, usize>| counted.values().sum::<usize>();
    std::thread::sleep(Duration::from_millis(20));
    let before = count()?;
    for round in 0..4 {
        lives(world, round % 2 == 0)?;
    }
    let begin = Instant::now();
    loop {
        let after = count()?;
        if total(&after) <= total(&before) {
            return Ok(());
        }
        if begin.elapsed() > Duration::from_secs(2) {
            let more: Vec<_> = after
                .iter()
                .filter(|(name, count)| **count > before.get(*name).copied().unwrap_or(0))
                .map(|(name, count)| format!("{count} x {name}"))
                .collect();
            return Err(Breach::new(format!(
                "eight backends ended and left {} {what}s behind; of these there are more than before: {}",
                total(&after) - total(&before),
                more.join(", ")
            )));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn listed(
    directory: &str,
    name: impl Fn(&std::path::Path) -> Option<String>,
) -> Verdict<BTreeMap<String, usize>> {
    let failed = |error| Breach::new(format!("the kit cannot read {directory}: {error}"));
    let mut counted = BTreeMap::new();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        // What ends while it is looked at is not left behind.
        if let Some(name) = entry.ok().and_then(|entry| name(&entry.path())) {
            *counted.entry(name).or_insert(0) += 1;
        }
    }
    Ok(counted)
}

fn threads() -> Verdict<BTreeMap<String, usize>> {
    listed("/proc/self/task", |path| {
        std::fs::read_to_string(path.join("comm")).ok().map(|name| name.trim().to_owned())
    })
}

fn descriptors() -> Verdict<BTreeMap<String, usize>> {
    listed("/proc/self/fd", |path| {
        let target = std::fs::read_link(path).ok()?.to_string_lossy().into_owned();
        // Sockets and pipes differ by a number only.
        Some(target.split(['[', ':']).next().unwrap_or(&target).to_owned())
    })
}

/// Processor time of this process, all threads together.
fn used() -> Verdict<Duration> {
    let failed = |what: &str| Breach::new(format!("the kit cannot tell processor time: {what}"));
    let mut nanoseconds = 0_u64;
    for entry in std::fs::read_dir("/proc/self/task").map_err(|error| failed(&error.to_string()))? {
        let Ok(entry) = entry else { continue };
        let Ok(text) = std::fs::read_to_string(entry.path().join("schedstat")) else { continue };
        let first = text.split_whitespace().next().and_then(|first| first.parse::<u64>().ok());
        nanoseconds += first.ok_or_else(|| failed("schedstat"))?;
    }
    ensure!(nanoseconds > 0, "the kernel does not count processor time (schedstat)");
    Ok(Duration::from_nanos(nanoseconds))
}

fn idle(world: &World) -> Verdict {
    const WINDOW: Duration = Duration::from_millis(200);
    let pair = world.pair()?;
    greet(world, &pair)?;
    let mut lane = world.lane(&pair, 256)?;
    let mode = modes(&lane)?[0];
    let segment = lane.segment(0, 0, 40);
    world.transfer(&mut lane, mode, &[segment], None)?;
    let mut least = Duration::MAX;
    // What disturbs one window does not disturb three.
    for _ in 0..3 {
        let before = used()?;
        std::thread::sleep(WINDOW);
        least = least.min(used()?.saturating_sub(before));
        if least < WINDOW / 100 {
            return Ok(());
        }
    }
    Err(Breach::new(format!("idle for {WINDOW:?}, it used {least:?} of processor time")))
}
