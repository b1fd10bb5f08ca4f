//! No bytes, however wrong, make the readers of what strangers send panic, or take memory out of proportion; and what is
//! taken is as good as if it had been made here.
//!
//! `KVX_CASES` is the number of wrong cards, 20,000 where nothing is said; `KVX_LONG=1` asks for a million. The seed is printed,
//! and `KVX_SEED` replays it. `fuzz/` goes on where this ends.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

mod allocator;
mod dear;
mod mutate;
mod samples;
mod seeds;

use kvx_core::card::{Address, Card, CardReader, FeatureSet};
use kvx_core::layout::{ModelGeometry, RankLayout};
use kvx_core::{Error, ErrorKind, Result};

use allocator::{Taken, measure};
use mutate::{Random, mutate};

/// A reader that knows every feature.
fn reader() -> CardReader {
    CardReader::default().with_features(FeatureSet::from_bits(u64::MAX))
}

/// Reads any bytes as a card, head first.
fn read(bytes: &[u8]) -> (Result<Card>, Taken) {
    let reader = reader();
    measure(|| {
        let _ = reader.peek(bytes);
        reader.decode(bytes)
    })
}

/// Bytes that the layout's check may take besides, however small the card: tensors that lie across each other are compared row
/// by row, 65,536 rows at most. Few cards need that.
const ROWS: usize = 2 << 20;

fn seed() -> u64 {
    // The second is the seed of properties, which `./test` sets so that it runs the same cases every time.
    let set = std::env::var("KVX_SEED").or_else(|_| std::env::var("PROPTEST_RNG_SEED"));
    let seed = match set {
        Ok(text) => text.parse().expect("KVX_SEED is a number"),
        Err(_) => std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos().into(),
    };
    println!("KVX_SEED={seed}");
    seed
}

fn cases() -> u64 {
    match std::env::var("KVX_CASES") {
        Ok(text) => text.parse().expect("KVX_CASES is a number"),
        Err(_) if std::env::var("KVX_LONG").is_ok_and(|long| long == "1") => 1_000_000,
        Err(_) => 20_000,
    }
}

/// What a refusal blames, of what there is to blame.
const PARTS: [(&str, &str); 5] = [
    ("the head", "the head "),
    ("the body", "the body "),
    ("the envelope", "envelope"),
    ("the schema", "schema"),
    ("the length", "the card"),
];

/// The part that a refusal names. Anything else than a refusal by a reason that a person can act upon is a failure.
fn blamed(error: &Error) -> &'static str {
    let kinds = [ErrorKind::Peer, ErrorKind::Unsupported];
    assert!(kinds.contains(&error.kind()), "{:?}: {error}", error.kind());
    let text = error.to_string();
    assert!(text.len() < 2000 && !text.chars().any(char::is_control), "{text:?}");
    let named = PARTS.iter().find(|(_, word)| text.contains(word)).map(|(part, _)| *part);
    // What is well formed and means nothing: the field is named by whoever checks it.
    named.unwrap_or_else(|| {
        assert!(!error.message().is_empty() && !error.operation().is_empty(), "{text}");
        "a field"
    })
}

/// A card that was taken is what it would be if it had been made here.
fn unharmed(card: &Card) {
    let layout = card.layout();
    assert_eq!(&RankLayout::new(layout.clone().into_parts()).unwrap(), layout);
    assert!(card.offers().iter().all(|offer| offer.keys().len() == layout.regions().len()));
    let written = match card.encode() {
        Ok(written) => written,
        // Written by others in fewer bytes than here.
        Err(error) => return assert!(error.to_string().contains("too long"), "{error}"),
    };
    let again = reader().decode(&written).unwrap();
    assert_eq!(again.identity(), card.identity());
    assert_eq!(again.control(), card.control());
    assert_eq!(again.facts(), card.facts());
    assert_eq!(again.head().features(), card.head().features());
    assert_eq!(again.layout(), layout);
    assert_eq!(again.offers(), card.offers());
    assert_eq!(again.encode().unwrap(), written);
}

/// One wrong card, or not a card at all.
fn wrong(random: &mut Random, good: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = good[random.below(good.len())].clone();
    match random.below(20) {
        0 => (0..random.below(200)).map(|_| random.byte()).collect(),
        1 => {
            // Nothing of a card but its envelope.
            bytes[samples::ENVELOPE..].fill_with(|| random.byte());
            bytes
        }
        _ => {
            mutate(random, &mut bytes, good);
            bytes
        }
    }
}

#[test]
fn wrong_cards_are_refused_by_name_or_taken_unharmed() {
    let (seed, cases) = (seed(), cases());
    assert!(cases > 0, "no case was asked for");
    let good = samples::good_cards();
    for bytes in &good {
        unharmed(&read(bytes).0.unwrap());
    }
    let mut found = std::collections::BTreeMap::<&str, u64>::new();
    let (mut most, mut largest, mut dears) = (0, 0, 0_u64);
    for case in 0..cases {
        // Each case follows from the seed and its number alone.
        let mut random = Random(seed ^ case.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let bytes = wrong(&mut random, &good);
        let judged = std::panic::catch_unwind(|| {
            let (result, taken) = read(&bytes);
            let limit = 32 * bytes.len() + 4096;
            let dear = taken.held > limit || taken.largest > limit / 2;
            let (held, largest) = if dear { (limit + ROWS, ROWS) } else { (limit, limit / 2) };
            assert!(taken.held <= held, "{taken:?} of {} bytes", bytes.len());
            assert!(taken.largest <= largest, "{taken:?} of {} bytes", bytes.len());
            let part = match &result {
                Ok(card) => {
                    unharmed(card);
                    "nothing"
                }
                Err(error) => blamed(error),
            };
            (part, taken, dear)
        });
        let (part, taken, dear) = judged.unwrap_or_else(|panic| {
            println!("case {case} of KVX_SEED={seed}: {}", bytes.escape_ascii());
            std::panic::resume_unwind(panic)
        });
        *found.entry(part).or_default() += 1;
        most = most.max(taken.held);
        largest = largest.max(taken.largest);
        dears += u64::from(dear);
    }
    assert!(dears <= cases / 1000 + 1, "{dears} of {cases} cards had rows compared, seed {seed}");
    println!("{cases} cases; refused for {found:?}; held {most} bytes at most, {largest} at once");
    // Otherwise much of the reader was never reached.
    if cases >= 1000 {
        for (part, _) in PARTS.iter().chain(&[("a field", ""), ("nothing", "")]) {
            let count = found.get(part).copied().unwrap_or(0);
            assert!(count > cases / 5000, "{part}: {count} of {cases}, seed {seed}");
        }
    }
}

/// Bytes from outside that are read as text.
fn wrong_texts(samples: Vec<(String, Vec<u8>)>, judge: impl Fn(&str)) {
    let (seed, cases) = (seed(), cases() / 10 + 1);
    let good: Vec<Vec<u8>> = samples.into_iter().map(|(_, bytes)| bytes).collect();
    for case in 0..cases {
        let mut random = Random(seed ^ case.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let mut bytes = good[random.below(good.len())].clone();
        mutate(&mut random, &mut bytes, &good);
        judge(&String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn wrong_configurations_are_refused_by_name_or_are_a_model() {
    wrong_texts(samples::configs(), |text| {
        let (result, taken) = measure(|| ModelGeometry::from_hf_config(text));
        match result {
            Ok(model) => assert!(model.num_layers() > 0 && model.facts().is_ok(), "{text}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Config, "{text}: {error}"),
        }
        // So many layers may be asked for, and no more.
        assert!(taken.held <= 4 << 20, "{taken:?}: {text}");
    });
}

#[test]
fn wrong_addresses_are_refused_or_have_one_form() {
    wrong_texts(samples::addresses(), |text| match text.parse::<Address>() {
        Ok(address) => {
            assert_eq!(address.to_string().parse::<Address>().unwrap(), address, "{text:?}");
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::Config, "{text:?}: {error}"),
    });
}
