//! The tags under which data travels where UCX has no way of its own to the peer's memory. Each is used once at a time, for one
//! range, and says whose it is: its upper half is that of the receiver's word for the connection. The lower half counts, apart
//! for what the receiver asked for and for what the sender announces.

use std::ops::Range;

/// Of what the sender announces.
const ANNOUNCED: u64 = 1 << 31;
/// So many tags are counted before the first is used again.
const COUNT: u32 = 1 << 31;

/// Of one connection.
#[derive(Debug, Default)]
pub(crate) struct Tags {
    /// How many were used to ask, and to announce.
    asked: u32,
    sent: u32,
    /// The one after those that the peer has announced.
    heard: u32,
}

/// Which connection a word or a tag is of.
pub(crate) const fn space(word: u64) -> u32 {
    (word >> 32) as u32
}

fn take(next: &mut u32, base: u64, count: u32) -> Range<u64> {
    // Those of one list are in a row.
    if *next > COUNT - count {
        *next = 0;
    }
    let first = base | u64::from(*next);
    *next += count;
    first..first + u64::from(count)
}

impl Tags {
    /// For what this side asks of the peer. At most some thousands at a time.
    pub(crate) fn ask(&mut self, word: u64, count: u32) -> Range<u64> {
        take(&mut self.asked, u64::from(space(word)) << 32, count)
    }

    /// For what this side sends, by the peer's word.
    pub(crate) fn announce(&mut self, word: u64, count: u32) -> Range<u64> {
        take(&mut self.sent, u64::from(space(word)) << 32 | ANNOUNCED, count)
    }

    /// Notes what the peer has announced.
    pub(crate) fn heard(&mut self, tags: &Range<u64>) {
        self.heard = number(tags.end);
    }

    /// Whether what has come to this side under a tag of this connection may be asked for yet: it was not announced, and so it will
    /// be. Whatever this side asks for, it waits for before it asks.
    pub(crate) const fn may_be_announced(&self, tag: u64) -> bool {
        tag & ANNOUNCED != 0 && number(tag).wrapping_sub(self.heard) % COUNT < COUNT / 2
    }
}

const fn number(tag: u64) -> u32 {
    (tag % ANNOUNCED) as u32
}

/// The tags of a list of so many ranges that the peer asks for, by the peer's word; or that it announces, by this side's. `None` where
/// they are not.
pub(crate) fn of_list(word: u64, announced: bool, first: u64, count: usize) -> Option<Range<u64>> {
    let count = u32::try_from(count).ok()?;
    let right = space(first) == space(word)
        && (first & ANNOUNCED != 0) == announced
        && number(first) <= COUNT.checked_sub(count)?;
    right.then(|| first..first + u64::from(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORD: u64 = 0x1234_5678_9abc_def0;

    #[test]
    fn each_is_used_once_and_says_whose_it_is() {
        let mut tags = Tags::default();
        let lists = [tags.ask(WORD, 3), tags.announce(WORD, 2), tags.ask(WORD, 1), tags.announce(WORD, 4)];
        let mut all: Vec<u64> = lists.iter().cloned().flatten().collect();
        assert!(all.iter().all(|tag| space(*tag) == space(WORD)));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 10);
        for (list, announced) in lists.iter().zip([false, true, false, true]) {
            let count = usize::try_from(list.end - list.start).unwrap();
            assert_eq!(of_list(WORD, announced, list.start, count).as_ref(), Some(list));
            assert_eq!(of_list(WORD, !announced, list.start, count), None);
            assert_eq!(of_list(!WORD, announced, list.start, count), None);
        }
        assert_eq!(of_list(WORD, true, lists[1].start, 1 << 31 | 1), None);
        assert_eq!(of_list(WORD, true, lists[1].start | 0x7fff_ffff, 2), None, "beyond the last");
    }

    #[test]
    fn they_begin_again_and_what_was_announced_is_known_from_what_will_be() {
        let (mut here, mut there) = (Tags { sent: COUNT - 5, ..Tags::default() }, Tags::default());
        there.heard = COUNT - 5;
        for count in [3, 4, 100] {
            let list = here.announce(WORD, count);
            assert!(list.clone().all(|tag| there.may_be_announced(tag)), "{count}");
            there.heard(&list);
            assert!(!list.clone().any(|tag| there.may_be_announced(tag)), "{count}");
            assert!(of_list(WORD, true, list.start, count as usize).is_some());
        }
        assert!(!there.may_be_announced(here.ask(WORD, 1).start), "what is asked for is waited for already");
    }
}
