//! Any bytes as a card: refused, or a card that is written and read again as the same.

#![no_main]

use kvx_core::ErrorKind;
use kvx_core::card::{CardReader, FeatureSet};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let reader = CardReader::default().with_features(FeatureSet::from_bits(u64::MAX));
    let head = reader.peek(bytes);
    match reader.decode(bytes) {
        Ok(card) => {
            assert_eq!(&head.expect("a card has a head"), card.head());
            // A card without defaults of later schemas may be written longer than it came.
            let Ok(written) = card.encode() else { return };
            let again = reader.decode(&written).expect("what is written is read");
            assert_eq!(again.identity(), card.identity());
            assert_eq!(again.control(), card.control());
            assert_eq!(again.facts(), card.facts());
            assert_eq!(again.layout(), card.layout());
            assert_eq!(again.offers(), card.offers());
        }
        Err(error) => {
            let blamed = matches!(error.kind(), ErrorKind::Peer | ErrorKind::Unsupported);
            assert!(blamed && !error.message().is_empty(), "{error}");
        }
    }
});
