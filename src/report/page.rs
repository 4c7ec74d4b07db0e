//! A page for people: aligned columns, colours where they are wanted, lines cut to a terminal's width.

/// Colours, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paint {
    /// Whether to colour.
    pub colour: bool,
}

/// What a text is to look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    /// Nothing special.
    Plain,
    /// Wants attention.
    Bold,
    /// In the background.
    Dim,
    /// Good.
    Green,
    /// Look here.
    Yellow,
    /// Wrong.
    Red,
}

impl Paint {
    /// Without colours.
    pub const PLAIN: Paint = Paint { colour: false };

    /// `text` in this ink.
    pub fn ink(self, ink: Ink, text: &str) -> String {
        let code = match ink {
            Ink::Plain => return text.to_owned(),
            Ink::Bold => "1",
            Ink::Dim => "2",
            Ink::Green => "32",
            Ink::Yellow => "1;33",
            Ink::Red => "1;31",
        };
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Aligns the cells of rows; two spaces between columns, nothing after the last.
pub fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    rows.iter()
        .map(|row| {
            let padded = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  "));
            padded.collect::<String>().trim_end().to_owned()
        })
        .collect()
}

/// Cuts a line to a number of columns, without cutting into a colour.
pub fn cut(line: &str, columns: usize) -> String {
    let mut left = columns;
    let mut cut = String::new();
    let mut in_colour = false;
    for c in line.chars() {
        if in_colour {
            in_colour = c != 'm';
        } else if c == '\x1b' {
            in_colour = true;
        } else if left == 0 {
            continue;
        } else {
            left -= 1;
        }
        cut.push(c);
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_nothing_follows_the_last() {
        let rows = [vec!["PID".into(), "USER".into()], vec!["12345".into(), "é".into(), "x".into()]];
        assert_eq!(aligned(&rows), ["PID    USER", "12345  é     x"]);
    }

    #[test]
    fn a_cut_line_keeps_its_colours_whole() {
        let painted = Paint { colour: true }.ink(Ink::Red, "stale");
        assert_eq!(cut(&format!("ab {painted} cd"), 5), "ab \x1b[1;31mst\x1b[0m");
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(Paint::PLAIN.ink(Ink::Red, "x"), "x");
    }
}
