//! Whatever strangers and broken peers may send, by seed: nothing panics, nothing grows.

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::*;

fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// What one side says in a session, item by item.
struct Recorded {
    security: Security,
    items: Vec<Vec<u8>>,
}

fn recorded() -> Vec<Recorded> {
    // Without a key everything behind the encryption is reached.
    let mut pair = Pair::new(local("decode", plain()), local("prefill", plain()));
    let mut said = take(&mut pair.dials);
    let hello = said.split_off(PREAMBLE_BYTES);
    pair.dialled.receive(&said, &mut pair.heard[1]).unwrap();
    pair.dialled.receive(&hello, &mut pair.heard[1]).unwrap();
    let answer = take(&mut pair.dialled);
    pair.dials.receive(&answer, &mut pair.heard[0]).unwrap();
    let mut plain_items = vec![said, hello];
    let mut item = |act: &mut dyn FnMut(&mut Session)| {
        act(&mut pair.dials);
        plain_items.push(take(&mut pair.dials));
    };
    item(&mut |it| it.send(b"a message").unwrap());
    item(&mut |it| it.send(&[]).unwrap());
    item(&mut |it| it.ping(1).unwrap());
    item(&mut |it| it.send(&vec![5; MAX_PAYLOAD_BYTES + 10]).unwrap());
    item(&mut |it| it.leave(Leave::Refused, "a reason"));
    let mut dials = Session::dial(&Arc::new(local("decode", keyed())), None).unwrap();
    let mut knock = take(&mut dials);
    let noise = knock.split_off(PREAMBLE_BYTES);
    vec![
        Recorded { security: plain(), items: plain_items },
        Recorded { security: keyed(), items: vec![knock, noise] },
    ]
}

fn mutate(items: &mut [Vec<u8>], rng: &mut ChaCha8Rng) {
    for _ in 0..rng.random_range(1..4) {
        let at = rng.random_range(0..items.len());
        let other = items[rng.random_range(0..items.len())].clone();
        let item = &mut items[at];
        if item.is_empty() {
            continue;
        }
        // Most of what matters stands at the beginning.
        let reach = if rng.random_bool(0.7) { item.len().min(32) } else { item.len() };
        let byte = rng.random_range(0..reach);
        match rng.random_range(0..9) {
            0 => item[byte] ^= 1 << rng.random_range(0..8),
            1 => item[byte] = rng.random(),
            2 => item[byte] = [0, 1, 0x7f, 0x80, 0xff, 0xc1, 0xdd, 0xdf][rng.random_range(0..8)],
            3 => item.truncate(byte),
            4 => drop(item.remove(byte)),
            5 => item.insert(byte, rng.random()),
            6 => {
                // The record's length is made right again: the record itself is short.
                item.truncate(byte.max(LENGTH_BYTES));
                let length = u16::try_from(item.len() - LENGTH_BYTES.min(item.len())).unwrap_or(0);
                if let Some(begins) = item.first_chunk_mut() {
                    *begins = length.to_le_bytes();
                }
            }
            7 => item.extend_from_slice(&other[..other.len().min(4096)]),
            _ => {
                let end = items.len();
                items.swap(at, rng.random_range(0..end));
            }
        }
    }
}

/// 100,000 streams of changed frames; ten million with `KVX_LONG=1`.
#[test]
fn changed_frames_do_no_harm() {
    let long = std::env::var("KVX_LONG").is_ok_and(|it| it == "1");
    let cases = from_env("KVX_CASES").unwrap_or(if long { 10_000_000 } else { 100_000 });
    let seed = from_env("KVX_SEED").unwrap_or(1);
    println!("KVX_SEED={seed}, {cases} cases");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let recorded = recorded();
    let locals: Vec<_> =
        recorded.iter().map(|it| Arc::new(local("prefill", it.security.clone()))).collect();
    let (mut faults, mut ups, mut knocks, mut unharmed) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut events = Vec::new();
    for _ in 0..cases {
        let which = usize::from(rng.random_bool(0.15));
        let mut items = recorded[which].items.clone();
        if which == 0 && rng.random_bool(0.95) {
            // Copying the long message is what takes most of the time.
            items.remove(5);
        }
        mutate(&mut items, &mut rng);
        let stream = items.concat();
        let keyed = which == 1;
        let mut session = Session::accept(&locals[which]);
        let mut rest = stream.as_slice();
        let mut over = false;
        events.clear();
        while !rest.is_empty() {
            let longest = if rng.random() { 16 } else { 70_000 };
            let cut = rng.random_range(1..=rest.len().min(longest));
            let (piece, others) = rest.split_at(cut);
            rest = others;
            let before = events.len();
            let result = session.receive(piece, &mut events);
            assert!(!over || (result.is_ok() && events.len() == before), "it is over");
            over |= result.is_err();
            assert_eq!(over, session.is_over());
            if keyed {
                assert!(session.output().is_empty() && session.kept() <= 64);
            }
            // What came, an answer to each ping, a hello, and what one read brought too much.
            assert!(session.kept() <= 4 * stream.len() + 8192, "{} kept", session.kept());
        }
        faults += u64::from(over);
        unharmed += u64::from(!over);
        ups += u64::from(events.iter().any(|it| matches!(it, SessionEvent::Up { .. })));
        knocks += u64::from(events.contains(&SessionEvent::Knocked));
    }
    println!("{faults} faults, {ups} up, {knocks} knocked, {unharmed} that ended in mid-record");
    for (what, count) in [("faults", faults), ("ups", ups), ("unharmed", unharmed)] {
        assert!(count > cases / 100, "{what}: {count}");
    }
    // One in seven is with a key, and few of those are not hurt where it matters.
    assert!(knocks < cases / 20, "{knocks}");
}

/// With a key, a changed stream gives what the unchanged one does, up to the change, and then a fault.
#[test]
fn changed_frames_of_a_proven_peer_give_nothing_of_their_own() {
    let seed = from_env("KVX_SEED").unwrap_or(2);
    println!("KVX_SEED={seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for _ in 0..300 {
        let mut pair = Pair::up(keyed);
        let mut items: Vec<_> = (0..6_u8)
            .map(|number| {
                pair.dials.send(&[number; 20]).unwrap();
                take(&mut pair.dials)
            })
            .collect();
        let unchanged = items.concat();
        mutate(&mut items, &mut rng);
        let stream = items.concat();
        let same = stream.iter().zip(&unchanged).take_while(|(a, b)| a == b).count();
        let whole = same / items[0].len().max(39);
        let result = pair.dialled.receive(&stream, &mut pair.heard[1]);
        assert!(
            pair.heard[1].len() <= 6
                && pair.heard[1].len() >= whole.min(6) * usize::from(result.is_ok())
        );
        for (number, event) in pair.heard[1].iter().enumerate() {
            let number = u8::try_from(number).unwrap();
            assert_eq!(*event, SessionEvent::Message(vec![number; 20]));
        }
    }
}
