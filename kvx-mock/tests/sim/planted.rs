//! Each planted fault is found, and named.

use std::sync::Arc;

use kvx_mock::Preset;
use kvx_mock::sim::{Exchange, Failure};

use crate::saboteur::{Fault, Keys, Saboteur};

/// Seeds within which a fault must be found.
const SEEDS: u64 = 1000;

fn found(fault: Fault) -> Box<Failure> {
    let run = |seed| {
        let exchange = Exchange::new(seed);
        // Where it is promised, it must be kept.
        let exchange = match fault {
            Fault::RevokedInNameOnly | Fault::ReadDespiteRevoke => exchange.preset(Preset::rc()),
            Fault::OrderClaimed => exchange.preset(Preset::efa()),
            _ => exchange,
        };
        let keys = Keys::default();
        exchange
            .wrap(move |backend| Arc::new(Saboteur::new(backend, fault, Arc::clone(&keys))))
            .run()
            .err()
    };
    let failure = (0..SEEDS).find_map(run);
    failure.unwrap_or_else(|| panic!("{fault:?} was not found in {SEEDS} seeds"))
}

#[test]
fn every_planted_fault_is_found() {
    let mut otherwise = Vec::new();
    for fault in Fault::ALL {
        let failure = found(fault);
        println!("{fault:?}: seed {}: {}", failure.seed, failure.violation);
        let words = match fault {
            Fault::NotifiedBeforeData => "was notified of",
            Fault::ReadAgainAfterSettled => "data is not there",
            Fault::SettledTwice => "told twice",
            Fault::SettledNever => "have settled",
            Fault::LastByteMissing => "data is not there",
            Fault::OneByteTooMany => "nothing is under way to it",
            Fault::DownBeforeSettled => "is down before",
            Fault::NotifiedTwice => "notified twice",
            Fault::NotifiedNever => "never notified",
            Fault::FailedCalledDone => "is done, and",
            Fault::CancelledCalledSettled => "nothing is under way",
            Fault::RevokedInNameOnly => "holds",
            Fault::FullButPosted => "nothing is in flight",
            Fault::StalePeerAccepted => "severing a peer that is down is accepted",
            Fault::DownNever => "stale or unknown peer",
            Fault::OrderClaimed => "only after one posted later",
            Fault::ReadDespiteRevoke => "is done, and",
            Fault::LimitsIgnored => "over the limit is accepted",
            Fault::ForeignKeyAccepted => "another incarnation's key is accepted",
            Fault::FailedForNothing => "and nothing was wrong",
            Fault::WrittenForRead => "nothing is under way to it",
        };
        if !failure.violation.to_string().contains(words) {
            otherwise.push(format!("{fault:?}, not as {words:?}: {}", failure.violation));
        }
    }
    assert!(otherwise.is_empty(), "found, but named otherwise: {otherwise:#?}");
}

/// What is printed says how to see it again, and doing so gives the same.
#[test]
fn a_failure_can_be_seen_again() {
    let failure = found(Fault::SettledTwice);
    let text = failure.to_string();
    assert!(text.contains(&format!("KVX_SEED={} runs it again", failure.seed)), "{text}");
    assert!(text.contains("Settled {"), "the end of the log is missing: {text}");
    assert_eq!(found(Fault::SettledTwice).to_string(), text);
}
