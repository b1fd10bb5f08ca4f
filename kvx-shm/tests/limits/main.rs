//! Two engines that meet where there are too few descriptors: both are told at once, whichever call is the one that gets none.

#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

#[cfg(test)]
mod meeting;

use kvx_core::ErrorKind;

use meeting::{close, lift, limit, meet, open};

/// More than a connection takes of this process, which has both of its ends.
const ENOUGH: usize = 24;

#[test]
fn both_are_told_at_once_of_a_limit_that_leaves_none() {
    lift();
    let (mut connected, mut named) = (0, 0);
    for more in 0..=ENOUGH {
        let (one, other) = (open(), open());
        limit(more);
        let told = meet(&one, &other);
        lift();
        [one, other].into_iter().for_each(close);
        let [Err(here), Err(there)] = &told else {
            connected += 1;
            continue;
        };
        for error in [here, there] {
            println!("{more} more: {error}");
            if error.kind() == ErrorKind::Resources {
                assert!(error.remedy().is_some_and(|r| r.contains("ulimit -n")), "{error}");
                named += 1;
            }
        }
        let one_of_them = [here, there].iter().any(|it| it.kind() == ErrorKind::Resources);
        assert!(one_of_them, "{more} more: {here} / {there}");
    }
    assert!(connected > 0, "{ENOUGH} are enough");
    assert!(named > 10, "none of {ENOUGH} limits were too low");
}
